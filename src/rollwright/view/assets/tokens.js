// The token view: every token of a row, coloured by probability, advantage or source; what is known of it on hover.
"use strict";
Report.tokens = (() => {
  const { el } = Report;
  const SOURCES = ["prompt", "sampled", "tool", "injected"];
  const FIRST = 4000; // tokens drawn before a click
  const spread = (runs) => (runs || []).flatMap(([value, length]) => Array(length).fill(value));

  // Texts of the tokens: bytes are decoded across tokens; one that ends within a character shows "·".
  const texts = (ids) => {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return ids.map((id) => {
      const piece = Report.pieces[id];
      if (piece === undefined) return `⟨${id}⟩`;
      return decoder.decode(Uint8Array.from(piece, (c) => c.charCodeAt(0)), { stream: true }) || "·";
    });
  };
  const visible = (text) => text.replace(/\r/g, "␍").replace(/\n/g, "↵\n").replace(/\t/g, "→\t")
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
      (c) => `⟨${c.charCodeAt(0).toString(16)}⟩`);

  const read = (row) => {
    const source = spread(row.provenance), advantages = spread(row.advantages), weights = spread(row.weights);
    let sampled = 0;
    const versions = new Map();
    row.spans.forEach(([version, start, end]) => { for (let i = start; i < end; i++) versions.set(i, version); });
    const shown = texts(row.tokens);
    return row.tokens.map((id, i) => ({
      id, text: shown[i], source: source[i],
      logprob: source[i] === 1 ? (row.logprobs[sampled++] ?? null) : null,
      version: versions.get(i), advantage: advantages[i], weight: weights[i],
    }));
  };

  const heat = (token, mode, most) => {
    if (token.source !== 1) return "";
    if (mode === "probability" && token.logprob !== null) {
      const level = Math.floor((1 - Math.exp(token.logprob / 1000)) * 7.999);
      return level > 0 ? `h${level}` : "";
    }
    if (mode === "advantage" && token.advantage) {
      return `${token.advantage > 0 ? "a" : "d"}${Math.max(1, Math.min(3, Math.ceil((Math.abs(token.advantage) / most) * 3)))}`;
    }
    return "";
  };

  const tip = document.getElementById("tip");
  const describe = (token, number) => {
    const lines = [["token", `${number}: ${token.id}`], ["text", JSON.stringify(token.text)], ["source", SOURCES[token.source] ?? "?"]];
    if (token.source === 1) {
      const logprob = token.logprob === null ? null : token.logprob / 1000;
      lines.push(["probability", logprob === null ? "–" : Report.number(Math.exp(logprob))], ["logprob", Report.number(logprob, 4)]);
      lines.push(["sampled by", token.version ?? "–"]);
      lines.push(["advantage", Report.number(token.advantage)], ["weight", Report.number(token.weight)]);
    }
    tip.replaceChildren(el("table", {}, lines.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, value)))));
  };
  const place = (event) => {
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + height + 24 > innerHeight ? event.clientY - height - 12 : event.clientY + 16}px`;
  };

  const KEYS = {
    probability: [["h1", "likely"], ["h4", "even"], ["h7", "a surprise"]],
    advantage: [["d3", "worse than its group"], ["a3", "better"]],
    source: [],
  };

  const view = (row, number, rows) => {
    const tokens = read(row);
    const most = Math.max(1e-9, ...(row.advantages || []).map(([value]) => Math.abs(value ?? 0)));
    const body = el("div", { class: "tokens" }), key = el("span", { class: "key" });
    let mode = "probability", limit = FIRST;
    const draw = () => {
      body.replaceChildren(...tokens.slice(0, limit).map((token, i) =>
        el("i", { class: `f${token.source} ${heat(token, mode, most)}`, "data-at": i }, visible(token.text))));
      if (tokens.length > limit) body.append(el("button", { on: { click: () => { limit = tokens.length; draw(); } } }, `${tokens.length - limit} more tokens`));
      key.replaceChildren(...[["f0", "prompt"], ["f1", "sampled"], ["f2", "tool"], ["f3", "injected"], ...KEYS[mode]].map(([name, text]) => el("i", { class: name }, text)));
      for (const button of buttons) button.setAttribute("aria-pressed", button.textContent === mode);
    };
    const buttons = ["probability", "advantage", "source"].map((name) => el("button", { type: "button", on: { click: () => { mode = name; draw(); } } }, name));
    for (const type of ["pointerover", "click"]) body.addEventListener(type, (event) => {
      const at = event.target.dataset.at;
      if (at === undefined) { tip.hidden = true; return; }
      describe(tokens[at], at);
      place(event);
    });
    body.addEventListener("pointerleave", () => { tip.hidden = true; });
    draw();
    const sampled = tokens.filter((token) => token.source === 1);
    const told = sampled.filter((token) => token.logprob !== null);
    const mean = told.length ? Math.exp(told.reduce((sum, token) => sum + token.logprob, 0) / told.length / 1000) : null;
    const trained = row.version ? `trained into ${row.version}` : "not trained";
    return el("section", {},
      el("h3", {}, rows > 1 ? `Tokens, row ${number + 1} of ${rows}` : "Tokens"),
      el("p", { class: "dim" }, `${tokens.length} tokens, ${sampled.length} sampled, geometric mean probability ${Report.number(mean)}; ${trained}.`),
      el("div", { class: "tools" }, buttons, key), body);
  };
  return { view };
})();
