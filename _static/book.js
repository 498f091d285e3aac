// What a style sheet cannot do for the pages.

// A formula in the text that is wider than its column becomes a line of its own that scrolls.
function fitFormulas() {
  for (const formula of document.querySelectorAll("article span.math")) {
    formula.classList.remove("wide");
    const column = formula.closest("p, li, td, dd, section")?.clientWidth;
    if (column && formula.firstElementChild?.offsetWidth > column) formula.classList.add("wide");
  }
}

// On the map of ideas the lines of the chapter under the pointer, or with the focus, stand out.
function lightLines(event) {
  const idea = event.target.closest?.("nav.ideas a")?.dataset.idea;
  for (const line of document.querySelectorAll("nav.ideas path"))
    line.classList.toggle("lit", idea !== undefined && [line.dataset.from, line.dataset.to].includes(idea));
}

document.addEventListener("DOMContentLoaded", () => {
  if (document.querySelector("nav.ideas"))
    for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, lightLines);
  if (window.MathJax?.startup) {
    MathJax.startup.promise.then(fitFormulas);
    window.addEventListener("resize", fitFormulas);
  }
  if (typeof Search === "object") {
    // A search result quotes the page's text: without TeX, and without the table of contents kept for printing.
    const toText = Search.htmlToText;
    Search.htmlToText = (html, anchor) => {
      const page = new DOMParser().parseFromString(html, "text/html");
      for (const element of page.querySelectorAll(".math, #jb-print-docs-body")) element.replaceWith(" … ");
      return toText(page.documentElement.outerHTML, anchor);
    };
  }
});
