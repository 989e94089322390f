// The load map: pairs of every expert of every layer, over the run or at one step.
(() => {
  "use strict";
  const report = lrmoe.page;
  const map = document.getElementById("load-map");
  if (map) loadMap(map);

  function loadMap(element) {
    const maps = report.loads;
    const training = document.getElementById("load-training");
    const view = document.getElementById("load-view");
    const slider = document.getElementById("load-step");
    const sliderLabel = document.getElementById("load-step-label");
    const output = document.getElementById("load-step-value");
    const number = new Intl.NumberFormat("en");

    // Numbers as the page packs them, unpacked once for each training.
    const kinds = { u2: Uint16Array, u4: Uint32Array, f8: Float64Array };
    const unpacked = new Map();
    function framesOf(one) {
      if (!unpacked.has(one)) {
        const bytes = Uint8Array.from(atob(one.frames.bdata), (letter) => letter.charCodeAt(0));
        unpacked.set(one, new kinds[one.frames.dtype](bytes.buffer));
      }
      return unpacked.get(one);
    }
    function frameOf(one, frame) {
      let at = frame * one.widths.reduce((a, b) => a + b, 0);
      return one.widths.map((width) => { at += width; return [...framesOf(one).subarray(at - width, at)]; });
    }

    // Pairs of each expert over the mean of its layer; null where the layer got none.
    const ratios = (layers) => layers.map((pairs) => {
      const mean = pairs.reduce((a, b) => a + b, 0) / pairs.length;
      return pairs.map((n) => (mean > 0 ? n / mean : null));
    });

    function show() {
      const one = maps[training ? Number(training.value) : 0];
      slider.max = String(one.steps.length - 1);
      const stepwise = view.value === "step";
      sliderLabel.hidden = !stepwise;
      const frame = view.value === "last" ? one.steps.length - 1 : Math.min(Number(slider.value), one.steps.length - 1);
      const pairs = view.value === "mean" ? one.total : frameOf(one, frame);
      output.textContent = number.format(one.steps[frame]);
      slider.setAttribute("aria-valuetext", `step ${one.steps[frame]}`);

      const z = ratios(pairs);
      // One scale for the whole run, so that steps can be compared; white is an even load.
      const top = Math.max(2, one.top);
      const even = 1 / top;
      const width = Math.max(1, ...pairs.map((layer) => layer.length));
      const rows = one.layers.length;
      const annotations = pairs.map((layer, i) => [layer, i]).filter(([layer]) => !layer.some((n) => n > 0)).map(([, i]) => ({
        x: (width - 1) / 2, y: i, text: "no pairs in this layer", showarrow: false, font: { size: 12, color: "#525c6b" },
      }));
      // Placed by hand: plotly sets the title of this axis on top of its tick labels when the chart is narrow.
      const axisTitle = { text: "expert", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0, yanchor: "top", yshift: -26,
        font: { size: 13, color: "#525c6b" } };
      const figure = {
        data: [{
          type: "heatmap", z, x: [...Array(width).keys()], y: one.layers.map((_, i) => i),
          customdata: pairs.map((layer, i) => layer.map((n) => [number.format(n), one.names[i]])),
          zmin: 0, zmax: top, xgap: width > 80 ? 0 : 1, ygap: rows > 40 ? 0 : 1, hoverongaps: false,
          colorscale: [[0, "#0b4f8b"], [even / 2, "#7fb0d8"], [even, "#f6f6f4"], [even + (1 - even) / 3, "#f2b36b"],
            [even + (1 - even) * 2 / 3, "#cf6a1a"], [1, "#7a2f00"]],
          colorbar: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", len: 0.6, lenmode: "fraction", thickness: 10, xpad: 0, ypad: 4,
            outlinewidth: 0, title: { text: "load over the layer's mean", side: "top", font: { size: 12 } }, tickfont: { size: 12 },
            // Where one and zero are close together, one matters more.
            tickangle: 0, tickvals: even < 0.12 ? [1, top] : [0, 1, top], ticktext: even < 0.12 ? ["1", top.toFixed(1)] : ["0", "1", top.toFixed(1)] },
          hovertemplate: "%{customdata[1]}<br>expert %{x}: %{customdata[0]} pairs<br>%{z:.2f} of the mean<extra></extra>",
        }],
        layout: {
          ...report.loadLayout,
          height: 150 + Math.max(rows * Math.min(34, Math.max(10, 560 / rows)), 68),
          annotations: [...annotations, axisTitle],
          xaxis: { ...report.loadLayout.xaxis, range: [-0.5, width - 0.5], dtick: width <= 16 ? 1 : undefined },
          yaxis: { ...report.loadLayout.yaxis, range: [rows - 0.5, -0.5],
            tickvals: one.layers.map((_, i) => i).filter((i) => rows <= 40 || i % 4 === 0),
            ticktext: one.layers.filter((_, i) => rows <= 40 || i % 4 === 0) },
        },
      };
      lrmoe.draw(element, figure);
    }
    for (const control of [training, view]) if (control) control.addEventListener("change", show);
    slider.addEventListener("input", show);
    slider.value = slider.max;
    show();
    lrmoe.again(show);
  }
})();
