"""Questions over a CSV file of sales: the agent reads `sales.csv` with its python tool and answers."""

import random

from rollwright.tasks.own import OwnTasks, Question, Step

CITIES = ("oslo", "lima", "kyiv", "cairo", "delhi", "quito", "seoul", "tunis", "paris", "accra")
ITEMS = ("tea", "rice", "salt", "soap", "wool", "lamps", "nails", "paper", "honey", "beans")
SUM = "sum(int(r.split(',')[2]) for r in open('sales.csv') if {})"


class Sales(OwnTasks):
    """How much of an item was sold in a city?"""

    rows: int = 24
    """Rows of the file."""

    def make(self, rng: random.Random) -> Question:
        """One file and one question about it."""
        cities, items = rng.sample(CITIES, 3), rng.sample(ITEMS, 3)
        sales = [(rng.choice(cities), rng.choice(items), rng.randint(1, 20)) for _ in range(self.rows)]
        city, item, _ = rng.choice(sales)
        # What a scripted run does: mostly right, but at times it forgets the city or the item.
        habit = rng.choices(("both", "item", "city"), (50, 30, 20))[0]
        tests = {"both": f"'{city},{item},' in r", "item": f"'{item}' in r", "city": f"'{city}' in r"}
        found = sum(n for c, i, n in sales if (habit == "item" or c == city) and (habit == "city" or i == item))
        return Question(
            ask=f"{item} sold in {city}?",
            answer=str(sum(n for c, i, n in sales if (c, i) == (city, item))),
            names=(item, city),
            files={"sales.csv": "".join(f"{c},{i},{n}\n" for c, i, n in sales)},
            script=(Step("python", SUM.format(tests[habit]), told=str(found)),),
            says=str(found),
        )
