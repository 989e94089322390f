// Sorts the tables of an index by the heading that is pressed; what is not known stays at the end.
(() => {
  "use strict";
  const keyOf = (cell) => {
    const data = cell.querySelector("data");
    const text = data ? data.value : cell.textContent.trim();
    const number = Number(text);
    return text === "" ? null : Number.isNaN(number) ? text : number;
  };
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));

  document.querySelectorAll(".sortable table").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    // On a narrow screen each cell says what it is.
    const labels = heads.map((head) => [...head.childNodes].map((node) => node.textContent).join(", "));
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, column) => { cell.dataset.label = labels[column]; });
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...[...head.childNodes].filter((node) => !node.classList?.contains("unit")));
      head.prepend(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].map((row) => [keyOf(row.cells[column]), row]);
        rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : (up ? 1 : -1) * order(a, b)));
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  });
})();
