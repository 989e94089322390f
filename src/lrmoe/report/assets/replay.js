// Draws the balancing page's bars: one small chart of the ranks' rows a policy, all moved by one slider.
(() => {
  "use strict";
  const { page, draw, again } = lrmoe;
  const bars = page.bars;
  const layer = document.getElementById("bars-layer");
  const drop = document.getElementById("bars-drop");
  const slider = document.getElementById("bars-step");
  const output = document.getElementById("bars-step-value");
  const panels = [...document.querySelectorAll(".panel")];
  const number = new Intl.NumberFormat("en");
  const sum = (rows) => rows.reduce((a, b) => a + b, 0);
  const ratio = (rows) => (sum(rows) > 0 ? (Math.max(...rows) * rows.length) / sum(rows) : null);
  const several = bars.frames.some((frame) => frame[1] > 0);

  function show() {
    if (bars.frames.length === 0) { panels.forEach((panel, i) => refuse(panel, bars.policies[i].drops[0].reason)); return; }
    const at = Number(slider.value), l = layer ? Number(layer.value) : 0, d = drop ? Number(drop.value) : bars.drops.length - 1;
    const [step, microbatch] = bars.frames[at];
    output.textContent = several ? `${number.format(step)}, microbatch ${microbatch}` : number.format(step);
    slider.setAttribute("aria-valuetext", `step ${step}`);
    const home = bars.home[l][at];
    // One scale for all policies and steps of a layer, so that they can be compared.
    const top = Math.max(1, ...bars.home[l].flat(), ...bars.policies.flatMap((p) => (p.drops[d].rows[l] || []).flat()));
    panels.forEach((panel, i) => panelOf(panel, bars.policies[i].drops[d], home, l, at, top));
  }

  function panelOf(panel, played, home, l, at, top) {
    const rows = (played.rows[l] || [])[at] || [], kept = (played.kept[l] || [])[at] || [];
    if (played.reason !== null || rows.length === 0) {
      refuse(panel, played.reason || "Nothing was recorded for this layer here.");
      return;
    }
    panel.querySelector(".empty").hidden = true;
    const element = panel.querySelector(".plot");
    element.hidden = false;
    const said = panel.querySelector(".ratio");
    const after = ratio(rows), before = home.length ? ratio(home) : after;
    // Without rows nothing is even or uneven.
    said.innerHTML = after === null || before === null ? "no load" : `busiest / mean <b>${after.toFixed(2)}</b>, at home ${before.toFixed(2)}`;
    said.classList.toggle("worse", after !== null && before !== null && after > before * 1.0005);
    const ranks = rows.map((_, rank) => rank), mean = sum(rows) / rows.length;
    const bar = (y, name, width, color) => ({ type: "bar", x: ranks, y, name, width, marker: { color }, hovertemplate: "%{y:,}" });
    const layout = {
      ...page.panel,
      xaxis: { ...page.panel.xaxis, range: [-0.6, ranks.length - 0.4], dtick: ranks.length <= 16 ? 1 : 8, hoverformat: "d", unifiedhovertitle: { text: "rank %{x}" } },
      yaxis: { ...page.panel.yaxis, range: [0, 1.06 * top] },
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: mean, y1: mean, line: { color: "#1c2430", width: 1.2, dash: "dot" } }],
    };
    const data = [bar(home, "at home", 0.92, "#d3d9e2"), bar(rows, "forward", 0.62, "#2f7fc1"), bar(kept, "kept", 0.28, "#0b3c66")];
    draw(element, { data, layout });
  }

  function refuse(panel, reason) {
    panel.querySelector(".plot").hidden = true;
    panel.querySelector(".ratio").textContent = "cannot run";
    const empty = panel.querySelector(".empty");
    empty.hidden = false;
    empty.textContent = reason || "Nothing was recorded.";
  }

  for (const control of [layer, drop]) if (control) control.addEventListener("change", show);
  slider.addEventListener("input", show);
  // It opens where the busiest rank is busiest: most steps look alike, that one shows what balancing is for.
  slider.value = String(bars.start);
  show();
  again(show);
})();
