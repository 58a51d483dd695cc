// What the theme leaves out: the level of a heading in the table of contents, the keyboard for what is wider than its
// box, and room on a phone, where a table of up to five columns becomes a list.
const COLUMNS = 5, ROW = 110; // pixels of a row on average: more is text in narrow columns

function stack(table, heads) {
  table.classList.add("stacked");
  table.setAttribute("role", "table"); // its look is no table's, so its meaning is said
  for (const row of table.tBodies[0].rows) {
    row.setAttribute("role", "row");
    [...row.cells].forEach((cell, column) => {
      cell.setAttribute("role", "cell");
      if (!cell.childNodes.length) return;
      const content = document.createElement("div"); // one box beside the name of the column
      content.append(...cell.childNodes);
      cell.append(content);
      cell.dataset.head = heads[column];
    });
  }
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".caption[role=heading]").forEach((heading) => heading.setAttribute("aria-level", "2"));
  document.querySelectorAll("dt dl").forEach((list) => list.setAttribute("role", "presentation")); // a long signature
  document.querySelectorAll(".table-wrapper").forEach((box) => {
    const table = box.querySelector("table");
    const heads = table.tHead ? [...table.tHead.rows[0].cells].map((head) => head.textContent) : [];
    const isTall = heads.length > 3 && table.offsetHeight > ROW * table.rows.length;
    const isTight = isTall || box.scrollWidth > box.clientWidth || box.closest(".compare");
    if (isTight && heads.length && heads.length <= COLUMNS && matchMedia("(max-width: 46em)").matches) stack(table, heads);
  });
  document.querySelectorAll("pre, .table-wrapper").forEach((box) => box.scrollWidth > box.clientWidth && (box.tabIndex = 0));
});
