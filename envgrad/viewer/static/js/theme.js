// Dark or light: as the system says, until the button says otherwise.

const KEY = "envgrad-theme";

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

/** Follow the system's choice; `button` changes it and remembers. */
export function theme(button) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    document.documentElement.dataset.theme = stored() ?? (dark.matches ? "dark" : "light");
  };
  dark.addEventListener("change", apply);
  button.addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      if (next === (dark.matches ? "dark" : "light")) localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, next);
    } catch {
      // A browser that keeps nothing still changes this page.
    }
    document.documentElement.dataset.theme = next;
  });
  apply();
}
