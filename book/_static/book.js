// A formula wider than the page scrolls in its own box. The keyboard must reach that box to scroll it; MathJax makes
// formulas reachable only together with its menu, which the site does without (see _config.yml).
async function reachWideFormulas() {
  await window.MathJax?.startup?.promise;
  for (const box of document.querySelectorAll("div.math, mjx-container[display]")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}
window.addEventListener("load", reachWideFormulas);
window.addEventListener("resize", reachWideFormulas);
