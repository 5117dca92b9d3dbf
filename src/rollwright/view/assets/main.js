// Brings the page to life; the address says which rollout is open.
"use strict";
(async () => {
  const trouble = (text) => {
    const node = document.getElementById("trouble");
    node.textContent = text;
    node.hidden = false;
  };
  if (typeof DecompressionStream === "undefined") {
    trouble("This browser cannot unpack the page's data (DecompressionStream is missing): use a newer one for curves and rollouts.");
    return;
  }
  const overview = await Report.unpack("data-overview");
  Report.success = overview.success;
  Report.pieces = overview.tokens;
  Report.charts(overview.charts);
  if (!document.getElementById("table")) return;
  Report.list(await Report.unpack("data-index"));

  Report.go = (id) => {
    if (id === null) {
      history.replaceState(null, "", location.pathname + location.search);
      Report.panel.hide();
    } else location.hash = Report.address(id);
  };
  const follow = () => {
    const wanted = /^#rollout=(.*)$/.exec(location.hash);
    if (!wanted) return Report.panel.hide();
    let id;
    try { id = decodeURIComponent(wanted[1]); } catch { id = wanted[1]; }
    const at = Report.table.positions.get(id);
    if (at === undefined) {
      Report.panel.hide();
      return trouble(`There is no rollout ${id} in this run.`);
    }
    document.getElementById("trouble").hidden = true;
    return Report.panel.show(at);
  };
  addEventListener("hashchange", follow);
  addEventListener("keydown", (event) => {
    if (document.getElementById("panel").hidden || event.target.closest("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    const [before, after] = Report.table.around(Report.panel.at);
    const to = { j: after, ArrowRight: after, k: before, ArrowLeft: before }[event.key];
    if (event.key === "Escape") Report.go(null);
    else if (to !== undefined && to >= 0) Report.go(Report.table.id(to));
  });
  await follow();
  document.documentElement.dataset.ready = "true";
})();
