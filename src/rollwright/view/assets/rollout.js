// One rollout, opened beside the page: task, turns, score, tokens, siblings.
"use strict";
Report.panel = (() => {
  const { el } = Report;
  const panel = document.getElementById("panel");
  let open = -1;

  const pill = (text, good) => el("span", { class: `pill ${good === null ? "" : good ? "good" : "bad"}` }, text);
  const say = (who, role, ...children) => el("div", { class: `say ${role}` }, el("span", { class: "who" }, who), children);
  const pre = (text) => el("pre", {}, text);
  const section = (title, ...children) => el("section", {}, el("h3", {}, title), children);

  const chip = (at, from) => {
    const { table } = Report, reward = table.reward(at);
    const tone = reward === null ? "" : reward >= Report.success ? "good" : "bad";
    return el("a", { class: `chip ${tone} ${at === from ? "at" : ""}`, href: Report.address(table.id(at)), title: `${table.text("split", at)}, ${table.text("outcome", at)}` },
      `${table.id(at)} · ${reward === null ? "no score" : Report.number(reward)}`);
  };

  const related = (at) => {
    const { table } = Report;
    const inOrder = (a, b) => table.id(a).localeCompare(table.id(b), "en", { numeric: true });
    const siblings = table.same("group", at).sort(inOrder);
    const others = table.same("task", at).filter((i) => !siblings.includes(i));
    const scored = siblings.map(table.reward).filter((value) => value !== null);
    const mean = scored.length ? scored.reduce((a, b) => a + b, 0) / scored.length : null;
    return [
      siblings.length > 1 && section(`Group ${table.text("group", at)}, mean reward ${Report.number(mean)}`, el("div", { class: "chips" }, siblings.slice(0, 64).map((i) => chip(i, at)))),
      others.length > 0 && section("The same task at other times", el("div", { class: "chips" }, others.slice(0, 32).map((i) => chip(i, at)), others.length > 32 && `and ${others.length - 32} more`)),
    ];
  };

  const facts = (at, body) => {
    const { table } = Report, reward = table.reward(at);
    const reason = table.text("reason", at), trained = table.text("trained", at);
    const rows = [
      ["task", table.text("task", at)], ["split", table.text("split", at)], ["outcome", table.text("outcome", at)],
      ["reward", reward === null ? "no score" : Report.number(reward)],
      ["disposition", [table.text("disposition", at) || "no ledger", reason && `: ${reason}`]],
      ["trained into", trained || "–"], ["sampled by", table.text("made", at) || "nothing was sampled"],
      ["turns", table.data.turns[at]], ["sampled tokens", table.data.sampled[at]], ["seconds", Report.number(table.data.seconds[at])],
      ["attempt", body ? body.attempt : "–"], ["trace", table.data.trace[at]],
    ];
    return el("dl", { class: "facts" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  };

  const task = (given) => {
    const environment = [
      ...given.files.map(([path, text]) => [path, text]), ...(given.sql ? [["database", given.sql]] : []),
      ...given.checks.map((text, i) => [`check ${i + 1}`, text]),
      ["limits and tags", JSON.stringify({ ...given.limits, ...given.tags })],
    ];
    return el("details", {}, el("summary", {}, `Task ${given.id} of ${given.set}: environment, checks, limits; tools ${given.tools.join(", ") || "none"}`),
      environment.map(([name, text]) => say(name, "system", pre(text))));
  };

  const turn = (given, number) => {
    const cached = given.prompt ? `, ${given.cached} of ${given.prompt} prompt tokens cached` : "";
    const said = say(`policy, turn ${number}`, "assistant", pre(given.text),
      el("div", { class: "meta" }, `${given.end - given.start} tokens, ${given.finish}, ${Report.number(given.model)} s${cached}`));
    const results = new Map(given.results.map((result) => [result.call, result]));
    const calls = given.calls.map((call) => [
      say(`call ${call.id}`, "call", pre(call.name ? `${call.name} ${call.arguments}` : call.raw)),
      results.has(call.id) && answered(results.get(call.id)),
    ]);
    const known = new Set(given.calls.map((call) => call.id));
    return [said, calls, given.results.filter((result) => !known.has(result.call)).map(answered)];
  };
  const answered = (result) => say("result", "tool", pill(result.status, result.status === "ok"), " ",
    el("span", { class: "meta" }, `${Report.number(result.seconds)} s${result.repeated ? ", a repeat" : ""}${result.terminated ? ", ended the rollout" : ""}${result.exit ? `, exit code ${result.exit}` : ""}`),
    pre(result.content), ["value", "stdout", "stderr"].filter((name) => result[name]).map((name) => el("details", {}, el("summary", {}, name), pre(result[name]))));

  const score = (body) => section("Score",
    body.unscorable && el("p", {}, `no score: ${body.unscorable}`),
    body.parts.length
      ? el("table", {}, el("thead", {}, el("tr", {}, ["check", "layer", "value", ""].map((name) => el("th", {}, name)))),
        body.parts.map(([name, layer, value, detail]) => el("tr", {}, el("td", {}, name), el("td", { class: "dim" }, layer), el("td", {}, pill(Report.number(value), value === null ? null : value >= 1)), el("td", { class: "dim" }, detail))))
      : el("p", { class: "none" }, "No check left a part."),
    el("p", { class: "dim" }, `scored by ${body.scorer}`));

  const top = (at) => {
    const [before, after] = Report.table.around(at);
    const go = (to, text, title) => el("button", { type: "button", title, disabled: to < 0, on: { click: () => Report.go(Report.table.id(to)) } }, text);
    return el("div", { class: "bar-top" }, el("h2", {}, Report.table.id(at)), go(before, "‹ previous", "k"), go(after, "next ›", "j"),
      el("button", { type: "button", title: "Esc", on: { click: () => Report.go(null) } }, "close"));
  };

  const show = async (at) => {
    open = at;
    const { table } = Report, id = table.id(at);
    const chunk = table.data.chunk[at];
    let parts, body = null;
    if (chunk < 0) parts = [el("p", { class: "notice" }, "This rollout is not in this file whole: see it with ", el("code", {}, `rollwright trace ${id}`), ".")];
    else {
      const found = await Report.chunk(chunk);
      if (open !== at) return; // another was opened meanwhile
      body = found.rollouts[table.data.place[at]];
      const given = found.tasks[body.task];
      parts = [
        section("Turns", el("div", { class: "thread" }, given.messages.map(([role, text]) => say(role, role, pre(text))), body.turns.map(turn)),
          body.turns.length === 0 && el("p", { class: "none" }, "No turn was made."),
          body.answer !== null && el("p", {}, "Answer: ", el("code", {}, body.answer)), body.error && el("p", { class: "notice" }, body.error)),
        score(body), body.rows.map((row, i) => Report.tokens.view(row, i, body.rows.length)), section("Task", task(given)),
      ];
    }
    panel.replaceChildren(top(at), facts(at, body), ...[...related(at), ...parts].flat(9).filter(Boolean));
    panel.hidden = false;
    panel.scrollTop = 0;
    panel.dataset.rollout = id;
    panel.focus({ preventScroll: true });
    table.draw();
  };
  const hide = () => {
    open = -1;
    panel.hidden = true;
    document.getElementById("tip").hidden = true;
    delete panel.dataset.rollout;
    if (Report.table) Report.table.draw();
  };
  return { show, hide, get at() { return open; } };
})();
