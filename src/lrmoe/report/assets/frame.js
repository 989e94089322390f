// Draws the figures of a page in the reader's colours and width, and wires the controls that all pages share.
const lrmoe = (() => {
  "use strict";
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const config = { displaylogo: false, displayModeBar: false, responsive: true };
  const hidden = new Set(); // positions of the variants that are switched off

  const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",");
  const night = new Map(Object.entries(page.night));
  for (const [day, other] of Object.entries(page.night)) night.set(channels(day), channels(other));
  // A colour as the reader's scheme has it; translucent ones keep their opacity.
  function paint(colour) {
    if (!dark.matches || typeof colour !== "string") return colour;
    const clear = /^rgba\(([\d,]+),([\d.]+)\)$/.exec(colour);
    if (clear) return night.has(clear[1]) ? `rgba(${night.get(clear[1])},${clear[2]})` : colour;
    return night.get(colour) ?? colour;
  }
  const isColour = /colou?r$|colors$|colorscale$/i;
  // A figure with its colours replaced; only names of colours are looked at, and data stays what it is.
  function themed(value, name = "") {
    if (typeof value === "string") return isColour.test(name) ? paint(value) : value;
    if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
    if (Array.isArray(value)) {
      if (isColour.test(name)) return value.map((one) => themed(one, name));
      return typeof value[0] === "object" && !["x", "y", "z", "text", "customdata"].includes(name) ? value.map((one) => themed(one)) : value;
    }
    return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, themed(one, key)]));
  }

  function draw(element, figure) {
    const { data, layout } = dark.matches ? themed(figure) : figure;
    const shown = data.map((trace) => ({ ...trace, visible: !(trace.meta && hidden.has(trace.meta.variant)) }));
    // On a touch screen a drag scrolls the page; elsewhere it zooms, and a double click shows everything again.
    const frame = touch ? { ...layout, dragmode: false } : { ...layout };
    return Plotly.react(element, shown, frame, config).then(() => { element.dataset.rendered = "true"; });
  }

  const plots = [...document.querySelectorAll(".plot[data-figure]")];
  const figureOf = (element) => {
    const figure = page.figures[element.dataset.figure];
    return Array.isArray(figure) ? figure[Number(element.dataset.choice || 0)] : figure;
  };
  function redraw(element) {
    const figure = figureOf(element);
    const empty = element.parentElement.querySelector(".empty");
    element.hidden = !figure;
    if (empty) empty.hidden = Boolean(figure);
    if (figure) return draw(element, figure);
  }

  // Variants on and off, in every chart that draws variants.
  document.querySelectorAll(".legend button").forEach((button) => {
    button.addEventListener("click", () => {
      const variant = Number(button.dataset.variant);
      if (!hidden.delete(variant)) hidden.add(variant);
      button.setAttribute("aria-pressed", String(!hidden.has(variant)));
      plots.filter((p) => figureOf(p)?.data.some((t) => t.meta && "variant" in t.meta)).forEach(redraw);
    });
  });

  // One choice for the charts that show one of several figures at a time.
  document.querySelectorAll("select[data-for]").forEach((select) => {
    const chosen = select.dataset.for.split(" ").flatMap((name) => [...document.querySelectorAll(`.plot[data-figure="${name}"]`)]);
    const choose = () => chosen.forEach((element) => { element.dataset.choice = select.value; });
    choose();
    select.addEventListener("change", () => { choose(); chosen.forEach(redraw); });
  });

  // Pages with drawings of their own register how to draw them again.
  const others = [];
  plots.forEach(redraw);
  dark.addEventListener("change", () => { plots.forEach(redraw); others.forEach((again) => again()); });
  return { page, paint, draw, redraw, again: (fn) => { others.push(fn); } };
})();
