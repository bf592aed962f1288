// Before the first paint: dark or light (theme.js does the rest).
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("envgrad-theme");
  } catch {
    chosen = null;
  }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen ?? (dark ? "dark" : "light");
})();
