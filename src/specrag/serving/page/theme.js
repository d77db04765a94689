// Runs before the page is painted, so that a chosen theme does not flash in late. Not a module for that reason.
(() => {
  const THEMES = ["system", "light", "dark"];
  let theme = "system";
  try {
    theme = localStorage.getItem("specrag-theme") ?? "system";
  } catch {
    // A browser that forbids storage follows the system.
  }
  const apply = () => {
    document.documentElement.dataset.theme = THEMES.includes(theme) ? theme : "system";
  };
  apply();
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const say = () => { button.textContent = `Theme: ${document.documentElement.dataset.theme}`; };
    say();
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
      apply();
      say();
      try {
        localStorage.setItem("specrag-theme", theme);
      } catch {
        // Chosen for as long as the page is open.
      }
    });
  });
})();
