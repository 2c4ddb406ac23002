// Draws every figure[data-plot] of a run's page with uPlot, and gives it what a canvas lacks: curves that are switched by
// real checkboxes, a slider that reads the values at a point, colours that follow the page's scheme.
// Exercised by tests/browser/test_pages.py. Texts come in as data and go out through textContent only.
(() => {
  "use strict";
  const specs = JSON.parse(document.getElementById("plots").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const font = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
  const drawn = [];

  const make = (tag, attributes = {}, text = "") => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    return node;
  };
  const short = (value) => {
    const size = Math.abs(value);
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    return size >= 1e4 ? `${+(value / 1e3).toPrecision(3)}k` : value.toLocaleString("en");
  };
  const fixed = (value, spec) => (value == null ? "–" : value.toFixed(spec.digits).replace("-", "−") + (spec.unit || ""));

  function options(spec, width) {
    const axis = { stroke: () => colour("quiet"), font, grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false } };
    const x = { time: false };
    if (spec.log) Object.assign(x, { distr: 3, log: 10, range: (u, low, high) => [low, high] });
    if (spec.whole) x.range = (u, low, high) => [low - 0.25, high + 0.25];
    return {
      width,
      height: width < 420 ? 220 : 260,
      padding: [12, 16, 0, 0],
      legend: { show: false },
      scales: { x, y: { range: (u, low, high) => bounds(spec, low, high) } },
      cursor: { y: false, drag: { x: !spec.whole, y: false, setScale: !spec.whole }, points: { size: 7 } },
      axes: [
        {
          ...axis,
          size: 34,
          space: 56,
          values: (u, ticks) => ticks.map((t) => (t == null || unnamed(spec, t) ? "" : short(t))),
          ...(spec.whole ? { incrs: [1] } : {}),
          ...(spec.log ? { splits: (u) => rounds(u.scales.x.min, u.scales.x.max), filter: (u, ticks) => ticks } : {}),
        },
        { ...axis, size: 46, values: (u, ticks) => ticks.map((t) => short(+t.toPrecision(6)) + (spec.unit || "")) },
      ],
      series: [
        {},
        ...spec.series.map((curve) => ({
          label: curve.label,
          stroke: () => colour(curve.tone),
          width: curve.width || 1.75,
          dash: curve.dash || [],
          show: curve.show !== false,
          spanGaps: true,
          points: { show: Boolean(curve.points), size: 6, stroke: () => colour(curve.tone), fill: () => colour("paper") },
        })),
      ],
      hooks: { draw: [(u) => marks(u, spec)] },
    };
  }

  function bounds(spec, low, high) {
    if (low == null || high == null) return [0, 1];
    if (spec.from != null) low = Math.min(spec.from, low);
    const room = Math.max((high - low) * 0.06, 1e-3);
    return [low === spec.from ? low : low - room, spec.to != null ? Math.min(spec.to, high + room) : high + room];
  }

  // 1, 2 and 5 times the powers of ten; over more than two decades only these powers are named.
  function rounds(low, high) {
    const ticks = [];
    for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
      for (const times of [1, 2, 5]) if (times * power >= low && times * power <= high) ticks.push(times * power);
    return ticks;
  }
  function unnamed(spec, tick) {
    const wide = spec.log && spec.x[spec.x.length - 1] / spec.x[0] > 100;
    return wide && Math.abs(Math.log10(tick) % 1) > 1e-9;
  }

  // Vertical lines: what the page says of one point of the x axis.
  function marks(u, spec) {
    for (const mark of spec.marks || []) {
      const at = Math.round(u.valToPos(mark.x, "x", true));
      const { left, top, width, height } = u.bbox;
      if (at < left || at > left + width) continue;
      u.ctx.save();
      u.ctx.strokeStyle = colour(mark.tone);
      u.ctx.lineWidth = 1.5 * devicePixelRatio;
      u.ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
      u.ctx.beginPath();
      u.ctx.moveTo(at, top);
      u.ctx.lineTo(at, top + height);
      u.ctx.stroke();
      u.ctx.restore();
    }
  }

  for (const figure of document.querySelectorAll("figure[data-plot]")) {
    const spec = specs[figure.dataset.plot];
    const canvas = figure.querySelector(".canvas");
    const controls = figure.querySelector(".controls");
    const plot = new uPlot(options(spec, canvas.clientWidth || 320), [spec.x, ...spec.series.map((s) => s.values)], canvas);

    const curves = make("fieldset", { class: "curves" });
    curves.append(make("legend", { class: "hidden" }, `Curves of the plot: ${spec.title}`));
    const values = spec.series.map((curve, i) => {
      const label = make("label");
      const box = make("input", { type: "checkbox" });
      box.checked = curve.show !== false;
      box.addEventListener("change", () => plot.setSeries(i + 1, { show: box.checked }));
      const swatch = make("span", { class: `swatch${curve.dash ? " dashed" : ""}`, "aria-hidden": "true" });
      swatch.style.color = `var(--${curve.tone})`;
      const value = make("span", { class: "value" });
      label.append(box, swatch, make("span", {}, curve.label), value);
      curves.append(label);
      return value;
    });

    const reader = make("label", { class: "reader" });
    const where = make("span", { class: "value" });
    const slider = make("input", { type: "range", min: 0, max: spec.x.length - 1, step: 1, value: spec.x.length - 1, "aria-label": `Read the plot at a point: ${spec.title}` });
    reader.append(slider, where);
    const read = (index) => {
      const at = spec.x[index];
      where.textContent = `${spec.xLabel} ${at.toLocaleString("en")}`;
      // Curves over different points are joined into one axis: each is read at its own last point up to here.
      const said = spec.series.map((curve) => {
        let i = index;
        while (i > 0 && curve.values[i] == null) i -= 1;
        return fixed(curve.values[i], spec);
      });
      said.forEach((text, i) => { values[i].textContent = text; });
      const shown = spec.series.map((c, i) => (plot.series[i + 1].show ? `${c.label} ${said[i]}` : "")).filter(Boolean);
      slider.setAttribute("aria-valuetext", `${where.textContent}: ${shown.join(", ")}`);
    };
    let quiet = false;
    slider.addEventListener("input", () => {
      const index = Number(slider.value);
      read(index);
      quiet = true;
      plot.setCursor({ left: plot.valToPos(spec.x[index], "x"), top: plot.over.clientHeight / 2 });
      quiet = false;
    });
    plot.hooks.setCursor = [...(plot.hooks.setCursor || []), (u) => {
      if (quiet || u.cursor.idx == null) return;
      slider.value = u.cursor.idx;
      read(u.cursor.idx);
    }];
    const whole = make("button", { type: "button", hidden: "" }, "Show all");
    whole.addEventListener("click", () => { plot.setScale("x", { min: spec.x[0], max: spec.x[spec.x.length - 1] }); slider.focus(); });
    plot.hooks.setScale = [...(plot.hooks.setScale || []), (u, key) => {
      const { min, max } = u.scales.x;
      if (key === "x" && !spec.whole) whole.hidden = min <= spec.x[0] && max >= spec.x[spec.x.length - 1];
    }];
    reader.append(whole);
    controls.append(curves, reader);
    read(spec.x.length - 1);
    new ResizeObserver(() => {
      const width = canvas.clientWidth;
      if (width && width !== plot.width) plot.setSize({ width, height: width < 420 ? 220 : 260 });
    }).observe(canvas);
    drawn.push(plot);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((plot) => plot.redraw(false)));
})();
