"""Questions over a CSV file of sales: the agent adds up its rows with the python tool and answers."""

import random

from rollwright.tasks.own import OwnTasks, Question, Step

CITIES = ("oslo", "lima", "kyiv", "cairo", "delhi", "quito", "seoul", "tunis", "paris", "accra")
ITEMS = ("tea", "rice", "salt", "soap", "wool", "lamps", "nails", "paper", "honey", "beans")
CODE = "sum(int(r.split(',')[2]) for r in open('sales.csv') if '{}' in r)"


class Sales(OwnTasks):
    """How much of an item was sold in a city?"""

    rows: int = 24
    """Rows of the file."""

    def make(self, rng: random.Random) -> Question:
        """One file and one question about it."""
        cities, items = rng.sample(CITIES, 3), rng.sample(ITEMS, 3)
        rows = [f"{rng.choice(cities)},{rng.choice(items)},{rng.randint(1, 20)}\n" for _ in range(self.rows)]
        city, item, _ = rng.choice(rows).split(",")

        def total(text: str) -> str:
            return str(sum(int(row.split(",")[2]) for row in rows if text in row))

        # What the scripted run looks for: too often it forgets the city, or the item. RL has to unlearn that.
        looked_for = rng.choices((f"{city},{item},", item, city), (35, 45, 20))[0]
        return Question(
            ask=f"{item} sold in {city}?",
            answer=total(f"{city},{item},"),
            names=(item, city),
            files={"sales.csv": "".join(rows)},
            script=(Step("python", CODE.format(looked_for), told=total(looked_for)),),
            says=total(looked_for),
        )
