// Draws the figures of a page, once.
(() => {
  "use strict";
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const config = { displaylogo: false, displayModeBar: false, responsive: true };
  document.querySelectorAll(".plot[data-figure]").forEach((element) => {
    const figure = page.figures[element.dataset.figure];
    const layout = touch ? { ...figure.layout, dragmode: false } : figure.layout;
    Plotly.react(element, figure.data, layout, config).then(() => { element.dataset.rendered = "true"; });
  });
})();
