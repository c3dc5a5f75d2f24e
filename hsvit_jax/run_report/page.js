const filter = document.getElementById("filter");
const rows = [...document.querySelectorAll("[data-classes]")];
filter.addEventListener("change", () => {
  for (const row of rows)
    row.hidden = filter.value !== "" && !row.dataset.classes.split(" ").includes(filter.value);
  for (const section of document.querySelectorAll("[data-shown]")) {
    const cards = [...section.querySelectorAll("[data-classes]")];
    const shown = cards.filter((card) => !card.hidden).length;
    section.querySelector("output").value = `${shown} of ${cards.length} shown`;
  }
});
