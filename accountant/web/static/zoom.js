// Dragging over a chart of time shows the span of the columns under it. Everything works without it: by links.
"use strict";

for (const chart of document.querySelectorAll("svg[data-left]")) {
  const columns = [...chart.querySelectorAll("g[data-start]")];
  const left = Number(chart.dataset.left);
  const width = Number(chart.dataset.right) - left;
  const mark = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  mark.setAttribute("class", "zoomed");
  mark.style.cssText = "fill: var(--accent); opacity: .18; pointer-events: none";
  chart.style.cssText = "cursor: crosshair; user-select: none";
  let from = null;
  let to = null;

  const columnAt = (event) => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
    return Math.max(0, Math.min(columns.length - 1, Math.floor(((x - left) / width) * columns.length)));
  };

  const draw = () => {
    const [first, last] = [Math.min(from, to), Math.max(from, to)];
    mark.setAttribute("x", left + (width * first) / columns.length);
    mark.setAttribute("width", (width * (last + 1 - first)) / columns.length);
    mark.setAttribute("y", 0);
    mark.setAttribute("height", chart.viewBox.baseVal.height);
    chart.append(mark);
  };

  const stop = () => {
    from = null;
    mark.remove();
  };

  chart.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch" || !columns.length) return;
    event.preventDefault();
    chart.setPointerCapture(event.pointerId);
    from = to = columnAt(event);
  });
  chart.addEventListener("pointermove", (event) => {
    if (from === null) return;
    to = columnAt(event);
    if (to !== from || mark.isConnected) draw();
  });
  chart.addEventListener("pointercancel", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  chart.addEventListener("pointerup", () => {
    if (from === null || !mark.isConnected) return stop();
    const address = new URL(location.href);
    address.searchParams.set("start", columns[Math.min(from, to)].dataset.start);
    const end = columns[Math.max(from, to)].dataset.end;
    if (end) address.searchParams.set("end", end);
    address.searchParams.delete("page");
    stop();
    location.assign(address);
  });
}
