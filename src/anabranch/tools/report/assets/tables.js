// Tables are sorted by the column whose name is pressed; pressed again, the other way round.
{
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };

  function compare(one, two) {
    if (typeof one === "number" && typeof two === "number") return one - two;
    return String(one).localeCompare(String(two), undefined, { numeric: true });
  }

  function sort(table, column) {
    const heads = [...table.tHead.rows[0].cells];
    const rising = heads[column].getAttribute("aria-sort") !== "ascending";
    heads.forEach((head, at) => {
      if (at === column) head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    const rows = [...table.tBodies[0].rows];
    rows.sort((one, two) => (rising ? 1 : -1) * compare(key(one, column), key(two, column)));
    table.tBodies[0].append(...rows);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const first = table.tBodies[0].rows[0];
      if (first && first.cells[column].classList.contains("words")) head.classList.add("words");
      head.firstElementChild.addEventListener("click", () => sort(table, column));
    });
  }
}
