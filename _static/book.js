// What a style sheet cannot do for the pages.

// A formula in the text that is wider than its column becomes a line of its own that scrolls.
function fitFormulas() {
  const formulas = [...document.querySelectorAll("article span.math")];
  for (const formula of formulas) formula.classList.remove("wide");
  const wide = formulas.filter(formula => { // all are measured before one changes, or each costs a layout
    const column = formula.closest("p, li, td, dd, section")?.clientWidth;
    return column && formula.firstElementChild?.offsetWidth > column;
  });
  for (const formula of wide) formula.classList.add("wide");
}

// On the map of ideas the lines of the chapter under the pointer, or with the focus, stand out.
function lightLines(event) {
  const idea = event.target.closest?.("nav.ideas a")?.dataset.idea;
  for (const line of document.querySelectorAll("nav.ideas path"))
    line.classList.toggle("lit", idea !== undefined && [line.dataset.from, line.dataset.to].includes(idea));
}

document.addEventListener("DOMContentLoaded", () => {
  for (const fold of document.querySelectorAll(".bd-links summary")) // an arrow only, without a name
    fold.setAttribute("aria-label", `Pages below ${fold.closest("li")?.querySelector("a")?.innerText.trim()}`);
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
