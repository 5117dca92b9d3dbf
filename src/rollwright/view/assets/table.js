// The list of all rollouts: filtered, sorted, and drawn only where it is looked at.
"use strict";
Report.list = (data) => {
  const { el } = Report;
  const box = document.getElementById("table"), find = document.getElementById("find"), found = document.getElementById("found");
  const HEIGHT = 28, count = data.id.length;
  const NAMED = ["group", "task", "split", "outcome", "disposition", "reason", "trained", "made"];
  const text = (name, at) => data[name].names[data[name].at[at]];
  const reward = (at) => data.reward[at];
  const COLUMNS = [["rollout", "id"], ["task", "task"], ["split", "split"], ["outcome", "outcome"], ["disposition", "disposition"],
    ["step", "step"], ["reward", "reward"], ["turns", "turns"], ["tokens", "sampled"], ["seconds", "seconds"]];
  const value = (name, at) => (NAMED.includes(name) ? text(name, at) : data[name][at]);
  const shown = (name, at) => {
    const it = value(name, at);
    return typeof it === "number" ? Report.number(it) : it === null ? "–" : String(it).replaceAll("_", name === "outcome" || name === "disposition" ? " " : "_");
  };
  const positions = new Map(data.id.map((id, at) => [id, at]));
  const lower = data.id.map((id, at) => `${id}\n${text("group", at)}\n${text("task", at)}\n${data.trace[at]}`.toLowerCase());
  let rows = data.id.map((_, at) => at), order = ["", 1];
  const choice = {};

  const rewards = { success: (v) => v !== null && v >= Report.success, failure: (v) => v !== null && v < Report.success, "no score": (v) => v === null };
  const select = (name, names) => {
    const node = el("select", { "aria-label": name, on: { change: () => { choice[name] = node.value; filter(); } } },
      el("option", { value: "" }, `any ${name}`), names.map((each) => el("option", { value: each }, each.replaceAll("_", " "))));
    return node;
  };
  const steps = [...new Set(data.step)].filter((v) => v !== null).sort((a, b) => a - b).map(String);
  document.getElementById("selects").append(
    ...["split", "outcome", "disposition"].map((name) => select(name, data[name].names.filter(Boolean))),
    select("reward", Object.keys(rewards)), steps.length > 1 ? select("step", steps) : "");

  const filter = () => {
    const wanted = find.value.trim().toLowerCase();
    const tests = Object.entries(choice).filter(([, v]) => v).map(([name, v]) =>
      name === "reward" ? (at) => rewards[v](reward(at)) : (at) => String(value(name, at)) === v);
    if (wanted) tests.push((at) => lower[at].includes(wanted));
    rows = [];
    for (let at = 0; at < count; at++) if (tests.every((test) => test(at))) rows.push(at);
    const [name, sign] = order;
    if (name) rows.sort((a, b) => {
      const [x, y] = [value(name, a), value(name, b)];
      if (x === null || y === null) return (x === null) - (y === null) || a - b;
      return (typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true })) * sign || a - b;
    });
    if (wanted && positions.has(find.value.trim())) { // an exact id comes first
      const exact = positions.get(find.value.trim());
      if (rows.includes(exact)) rows = [exact, ...rows.filter((at) => at !== exact)];
    }
    found.textContent = rows.length === count ? `${count.toLocaleString("en")} rollouts` : `${rows.length.toLocaleString("en")} of ${count.toLocaleString("en")}`;
    space.style.height = `${rows.length * HEIGHT}px`;
    box.scrollTop = 0;
    draw();
  };

  const sort = (name) => {
    order = order[0] === name ? (order[1] > 0 ? [name, -1] : ["", 1]) : [name, 1];
    for (const button of head.children) {
      if (button.dataset.name === order[0]) button.setAttribute("aria-sort", order[1] > 0 ? "ascending" : "descending");
      else button.removeAttribute("aria-sort");
      button.textContent = button.dataset.label + (button.dataset.name === order[0] ? (order[1] > 0 ? " ↑" : " ↓") : "");
    }
    filter();
  };
  const head = el("div", { class: "row head", role: "row" }, COLUMNS.map(([label, name]) =>
    el("button", { type: "button", role: "columnheader", "data-name": name, "data-label": label, on: { click: () => sort(name) } }, label)));
  const space = el("div", { id: "space" });
  box.append(head, space);

  const draw = () => {
    const first = Math.max(0, Math.floor(box.scrollTop / HEIGHT) - 8);
    const last = Math.min(rows.length, first + Math.ceil(box.clientHeight / HEIGHT) + 16);
    const drawn = [];
    for (let i = first; i < last; i++) {
      const at = rows[i];
      const row = el("div", { class: `row body ${at === Report.panel.at ? "at" : ""} ${data.chunk[at] < 0 ? "absent" : ""}`, role: "row", "data-at": at },
        COLUMNS.map(([, name]) => el("span", { role: "cell", class: NAMED.includes(name) || name === "id" ? "" : "num" }, shown(name, at))));
      row.style.top = `${i * HEIGHT}px`;
      drawn.push(row);
    }
    space.replaceChildren(...drawn);
  };

  box.addEventListener("scroll", draw);
  new ResizeObserver(draw).observe(box);
  space.addEventListener("click", (event) => {
    const row = event.target.closest("[data-at]");
    if (row) Report.go(data.id[Number(row.dataset.at)]);
  });
  find.addEventListener("input", filter);
  document.getElementById("filters").addEventListener("submit", (event) => {
    event.preventDefault();
    if (rows.length) Report.go(data.id[rows[0]]);
  });
  const same = (name, at) => {
    const key = data[name].at[at], others = [];
    for (let i = 0; i < count; i++) if (data[name].at[i] === key) others.push(i);
    return others;
  };
  const around = (at) => {
    const i = rows.indexOf(at);
    return i < 0 ? [at - 1, at + 1 < count ? at + 1 : -1] : [rows[i - 1] ?? -1, rows[i + 1] ?? -1];
  };
  Report.table = { data, text, reward, draw, same, around, positions, id: (at) => data.id[at] };
  filter();
};
