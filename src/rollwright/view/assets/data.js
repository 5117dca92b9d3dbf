// What the page carries, and how it is read: base64 of gzip of JSON, decoded on demand; text enters as textContent.
"use strict";
const Report = { chunks: new Map() };

Report.unpack = async (id) => {
  const node = document.getElementById(id);
  const bytes = Uint8Array.from(atob(node.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

// A chunk stays in memory once decoded; of many, the oldest go.
Report.chunk = (number) => {
  if (!Report.chunks.has(number)) {
    if (Report.chunks.size >= 24) Report.chunks.delete(Report.chunks.keys().next().value);
    Report.chunks.set(number, Report.unpack(`chunk-${number}`));
  }
  return Report.chunks.get(number);
};

// An element; children are elements or text, never markup.
Report.el = (tag, given = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name === "on") for (const [type, handler] of Object.entries(value)) node.addEventListener(type, handler);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(9)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
};

Report.number = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 1e-4) return Number(value.toPrecision(digits)).toExponential();
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
};
Report.percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
Report.address = (id) => `#rollout=${encodeURIComponent(id)}`;
