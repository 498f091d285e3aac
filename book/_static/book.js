// What a style sheet cannot do for the pages.

// A formula in the text that is wider than its column becomes a line of its own that scrolls; the number of an
// equation that is wider than the place beside it stands below.
function fitFormulas() {
  const formulas = [...document.querySelectorAll("article .math")];
  for (const formula of formulas) formula.classList.remove("wide");
  const wide = formulas.filter(formula => { // all are measured before one changes, or each costs a layout
    const set = formula.querySelector("mjx-container");
    if (formula.matches("div")) return set?.scrollWidth > set?.clientWidth;
    const column = formula.closest("p, li, td, dd, section")?.clientWidth;
    return column && set?.offsetWidth > column;
  });
  for (const formula of wide) formula.classList.add("wide");
}

// A figure is small on a phone: a tap shows it larger, in a box that scrolls, and another as it was.
function enlarge(event) {
  if (event.target.matches?.(".cell_output img") && matchMedia("(max-width: 576px)").matches)
    event.target.classList.toggle("large");
}

// On a phone the contents of the page lie over it: a tap on a section shows it.
function closeContents(event) {
  event.target.closest?.("#pst-secondary-sidebar-modal a")?.closest("dialog").close();
}

// The button of a folded solution is called as its title, whose link to the exercise above it is no stop for keys.
function nameSolutions() {
  for (const title of document.querySelectorAll(".solution.toggle > .admonition-title")) {
    title.querySelector("button")?.setAttribute("aria-label", title.textContent.trim().replace(/\s+/g, " "));
    title.querySelector("a")?.setAttribute("tabindex", "-1");
  }
}

document.addEventListener("DOMContentLoaded", () => {
  nameSolutions();
  for (const act of [enlarge, closeContents]) document.addEventListener("click", act);
  for (const fold of document.querySelectorAll(".bd-links summary")) // an arrow only, without a name
    fold.setAttribute("aria-label", `Pages below ${fold.closest("li")?.querySelector("a")?.innerText.trim()}`);
  if (window.MathJax?.startup) {
    MathJax.startup.promise.then(fitFormulas);
    window.addEventListener("resize", fitFormulas);
  }
  if (typeof Search === "object") {
    // A search result quotes the page's text: without TeX, and without what stands around the text.
    const toText = Search.htmlToText;
    const around = "#jb-print-docs-body, .bd-header-article, .prev-next-footer, .bd-sidebar-secondary";
    Search.htmlToText = (html, anchor) => {
      const page = new DOMParser().parseFromString(html, "text/html");
      for (const element of page.querySelectorAll(around)) element.remove();
      for (const element of page.querySelectorAll(".math")) element.replaceWith(" … ");
      return toText(page.documentElement.outerHTML, anchor).replace(/\s+/g, " ").trim();
    };
  }
});
