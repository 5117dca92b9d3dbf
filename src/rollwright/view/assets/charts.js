// Curves with uPlot: intervals as bands, values under the pointer, the same moment shown in every chart of an axis.
"use strict";
Report.charts = (charts) => {
  const { el } = Report;
  const box = document.getElementById("charts");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const shown = {
    share: (v) => Report.percent(v),
    number: (v) => Report.number(v),
    count: (v) => Report.number(v, 4),
  };

  const band = (u, series, index) => {
    const { ctx } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    ctx.clip();
    const at = (x, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
    const xs = u.data[0];
    if (series.points) {
      ctx.strokeStyle = colour(`--s${index}`);
      ctx.lineWidth = 2 * devicePixelRatio;
      xs.forEach((x, i) => {
        if (series.low[i] === null) return;
        ctx.beginPath();
        ctx.moveTo(...at(x, series.low[i]));
        ctx.lineTo(...at(x, series.high[i]));
        ctx.stroke();
      });
    } else {
      ctx.fillStyle = colour(`--s${index}`);
      ctx.globalAlpha = 0.16;
      const known = xs.map((_, i) => i).filter((i) => series.low[i] !== null);
      ctx.beginPath();
      known.forEach((i) => ctx.lineTo(...at(xs[i], series.high[i])));
      known.reverse().forEach((i) => ctx.lineTo(...at(xs[i], series.low[i])));
      ctx.fill();
    }
    ctx.restore();
  };

  const marks = (u, chart) => {
    const { ctx } = u;
    ctx.save();
    ctx.strokeStyle = colour("--dim");
    ctx.setLineDash([4, 4]);
    for (const mark of chart.marks) {
      const x = u.valToPos(mark, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, u.bbox.top);
      ctx.lineTo(x, u.bbox.top + u.bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };

  const range = (chart) => {
    const all = chart.series.flatMap((s) => [...s.values, ...(s.low || []), ...(s.high || [])]).filter((v) => v !== null);
    let [low, high] = [Math.min(...all), Math.max(...all)];
    if (chart.kind === "share") {
      const top = high > 0.3 || chart.series.some((s) => s.low) ? 1 : 1.1 * high || 1;
      return [-0.05 * top, 1.05 * top]; // room for a point at an edge
    }
    if (chart.kind === "count") low = Math.min(0, low);
    const pad = (high - low || Math.abs(high) || 1) * 0.08;
    return [chart.kind === "count" && low === 0 ? 0 : low - pad, high + pad];
  };

  // The value under the pointer; without one the last there is.
  const legend = (series, at, show) => {
    const value = series.values[at];
    if (value === null || value === undefined) return "–";
    const known = series.low && series.low[at] !== null;
    return known ? `${show(value)} [${show(series.low[at])}, ${show(series.high[at])}]` : show(value);
  };

  const options = (chart, width) => {
    const show = shown[chart.kind];
    const axis = { stroke: () => colour("--dim"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false } };
    const steps = chart.axis === "step";
    return {
      width,
      height: 190,
      cursor: { sync: { key: chart.axis }, points: { size: 7 } },
      scales: {
        x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low - (high - low) / 40, high + (high - low) / 40]) },
        y: { range: range(chart) },
      },
      series: [
        { label: steps ? "step" : "minute", value: (u, v) => (v === null || v === undefined ? "last" : Report.number(v, 4)) },
        ...chart.series.map((s, i) => ({
          label: s.name,
          stroke: () => colour(`--s${i}`),
          width: s.points ? 0 : 2,
          paths: s.points ? () => null : undefined,
          points: s.points ? { show: true, size: 8, fill: () => colour(`--s${i}`) } : { size: 5 },
          spanGaps: true,
          value: (u, v, _, at) => legend(s, at ?? s.values.findLastIndex((value) => value !== null), show),
        })),
      ],
      axes: [
        { ...axis, ...(steps ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5] } : {}), size: 28, values: (u, at) => at.map((v) => Report.number(v, 5)) },
        { ...axis, size: 56, values: (u, at) => at.map((v) => (chart.kind === "share" ? `${Report.number(100 * v)} %` : Report.number(v))) },
      ],
      hooks: {
        drawAxes: [(u) => chart.series.forEach((s, i) => s.low && band(u, s, i))],
        draw: [(u) => marks(u, chart)],
      },
    };
  };

  const draw = () => {
    box.replaceChildren();
    charts.forEach((chart, number) => {
      const card = el("div", { class: number === 0 ? "card wide" : "card" }, el("h3", {}, chart.title), el("p", { class: "dim" }, chart.note));
      box.append(card);
      if (!chart.x.length) return card.append(el("p", { class: "none" }, `No data: ${chart.empty}`));
      const plot = new uPlot(options(chart, 100), [chart.x, ...chart.series.map((s) => s.values)], card);
      const fit = () => plot.setSize({ width: Math.max(120, card.clientWidth - 36), height: number === 0 ? 240 : 190 });
      new ResizeObserver(fit).observe(card);
    });
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
};
