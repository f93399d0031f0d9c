// Tables that change in place: rows keep their elements, so that focus, selection and scrolling survive an update.
import { explain } from "/static/tips.js";

export function showTable(table, columns, rows, { sort, onSort } = {}) {
  if (!table.tHead) makeHead(table, columns, onSort);
  if (sort) {
    [...table.tHead.rows[0].cells].forEach((cell, at) => {
      if (columns[at].key === sort.key) cell.setAttribute("aria-sort", sort.ascending ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
  }
  const body = table.tBodies[0] ?? table.createTBody();
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  let place = body.firstElementChild;
  for (const { key, className, cells } of rows) {
    const row = known.get(key) ?? makeRow(columns, key);
    known.delete(key);
    if (row === place) place = place.nextElementSibling;
    else body.insertBefore(row, place);
    if (row.className !== (className ?? "")) row.className = className ?? "";
    cells.forEach((cell, at) => fill(row.cells[at], cell, columns[at]));
  }
  for (const row of known.values()) row.remove();
}

function makeHead(table, columns, onSort) {
  const row = table.createTHead().insertRow();
  for (const column of columns) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.className = classOf(column);
    if (onSort) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = column.title;
      button.onclick = () => onSort(column.key);
      cell.append(button);
    } else cell.textContent = column.title;
    if (column.word) explain(cell.firstElementChild ?? cell, column.word, !onSort);
    row.append(cell);
  }
}

function makeRow(columns, key) {
  const row = document.createElement("tr");
  row.dataset.key = key;
  for (const column of columns) {
    const cell = row.insertCell();
    cell.dataset.label = column.title;
  }
  return row;
}

function classOf(column) {
  return [column.number && "number", column.minor && "minor", column.long && "long"].filter(Boolean).join(" ");
}

function fill(cell, { text, more, title, className }, column) {
  const classes = [classOf(column), className].filter(Boolean).join(" ");
  if (cell.className !== classes) cell.className = classes;
  if (title && cell.title !== title) cell.title = title;
  const whole = more ? `${text} ${more}` : text ?? "";
  if (cell.dataset.shown === whole) return;
  cell.dataset.shown = whole;
  if (!more) {
    cell.textContent = whole;
    return;
  }
  const span = document.createElement("span");
  span.append(`${text} `);
  const small = document.createElement("span");
  small.className = "id";
  small.textContent = more;
  span.append(small);
  cell.replaceChildren(span);
}
