// What the theme leaves out: the level of a heading in the table of contents, and the keyboard for code wider than its box.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".caption[role=heading]").forEach((heading) => heading.setAttribute("aria-level", "2"));
  document.querySelectorAll("pre").forEach((code) => code.scrollWidth > code.clientWidth && (code.tabIndex = 0));
});
