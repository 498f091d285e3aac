// Formulas are set in small steps, so that a page of hundreds can be read and scrolled meanwhile: those in view
// first, the others whenever the browser has nothing else to do. Loaded before MathJax, which begins with `pageReady`
// and keeps its promise `MathJax.startup.promise` once all are set.

"use strict";
(() => {
  const STEP = 6; // milliseconds, less than a twentieth of what a reader notices
  const FOUND = 10; // MathJax's state of a formula that was found, and not yet read

  const idle = window.requestIdleCallback ? () => new Promise(done => requestIdleCallback(done, { timeout: 500 }))
    : () => new Promise(done => setTimeout(done));

  // The formulas of the page in the order in which they are wanted.
  async function found(page) {
    page.findMath({ elements: [".math"] }); // elsewhere are none, and looking there takes time
    await idle();
    const distance = ({ top, bottom }) => Math.max(0, top - innerHeight, -bottom);
    const formulas = [...page.math].map(formula =>
      ({ formula, far: distance(formula.start.node.parentElement.getBoundingClientRect()) }));
    await idle();
    page.getMetrics(); // measures the text around each, all at once
    for (const { formula } of formulas) formula.state(FOUND);
    return formulas.sort((a, b) => a.far - b.far).map(({ formula }) => formula);
  }

  // Sets formulas until the time is up or none is left.
  function set(formulas, page, until = Infinity) {
    do formulas.shift()?.render(page);
    while (formulas.length && performance.now() < until);
    page.addStyleSheet();
  }

  async function setAll() {
    const page = MathJax.startup.document;
    await idle();
    const formulas = await found(page);
    addEventListener("beforeprint", () => set(formulas, page));
    while (formulas.length) {
      await idle();
      set(formulas, page, performance.now() + STEP);
    }
    page.updateDocument();
  }

  MathJax.startup = { pageReady: setAll };
})();
