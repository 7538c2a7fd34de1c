"use strict";
// Zooms the timelines of the report along the time axis. Every pane holds pictures whose root has data-left,
// data-width (pixels of the axis), data-start and data-end (times at its ends, in the axis's unit). Panes with the same
// data-scale have the same seconds per pixel: they zoom and scroll together.
(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const TICK_DISTANCE = 80, FONT = 11, EM = 0.6;

  function roundStep(least) {
    const power = Math.pow(10, Math.floor(Math.log10(least)));
    for (const factor of [1, 2, 5]) if (factor * power >= least * (1 - 1e-9)) return factor * power;
    return 10 * power;
  }

  function element(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function dark(colour) {  // as ds_vpipe.pictures.palette.ink_on
    const value = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : Math.pow((c + 0.055) / 1.055, 2.4)));
    const light = 0.2126 * value[0] + 0.7152 * value[1] + 0.0722 * value[2];
    return 1.05 / (light + 0.05) >= (light + 0.05) / 0.0660;
  }

  // What a picture looks like at zoom 1, so that every zoom is computed from it and not from the one before.
  function remember(svg) {
    const number = (node, key) => parseFloat(node.getAttribute(key));
    const left = parseFloat(svg.dataset.left), width = parseFloat(svg.dataset.width);
    const ticks = [...svg.querySelectorAll("line.tick")];
    const numbers = svg.querySelector("text.tick");
    const picture = {
      svg, left, width, total: number(svg, "width"), height: number(svg, "height"),
      start: parseFloat(svg.dataset.start), end: parseFloat(svg.dataset.end),
      top: ticks.length ? number(ticks[0], "y1") : 0, bottom: ticks.length ? number(ticks[0], "y2") : 0,
      line: ticks.length ? ticks[0].getAttribute("stroke") : "", ink: numbers ? numbers.getAttribute("fill") : "",
      bars: [...svg.querySelectorAll("rect.bar, rect.row")].map((node) => ({
        node, x: number(node, "x"), width: number(node, "width"), label: node.dataset.label || "", text: null,
        roomy: number(node, "height") >= FONT * 1.15,
      })),
      areas: [...svg.querySelectorAll("polygon.area")].map((node) => ({
        node, points: node.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number)),
      })),
    };
    svg.querySelectorAll("text.label, .tick").forEach((node) => node.remove());
    picture.ticks = element("g", {});
    svg.insertBefore(picture.ticks, svg.children[1] || null);
    picture.side = element("g", {});
    svg.querySelectorAll(".side").forEach((node) => picture.side.appendChild(node));
    svg.appendChild(picture.side);
    return picture;
  }

  function drawTicks(picture, zoom) {
    const length = picture.end - picture.start;
    const step = roundStep(length * TICK_DISTANCE / (picture.width * zoom));
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    picture.ticks.replaceChildren();
    for (let index = Math.ceil(picture.start / step - 1e-9); index * step <= picture.end + 1e-9 * length; index += 1) {
      const x = picture.left + (index * step - picture.start) / length * picture.width * zoom;
      const place = { x1: x, x2: x, y1: picture.top, y2: picture.bottom, stroke: picture.line };
      picture.ticks.appendChild(element("line", place));
      const style = { x, y: picture.bottom + 9, fill: picture.ink, "font-size": FONT, "text-anchor": "middle",
        "dominant-baseline": "central" };
      picture.ticks.appendChild(element("text", style, (index * step).toFixed(digits)));
    }
  }

  function drawLabel(bar, x, width) {
    const fits = bar.label && bar.roomy && bar.label.length * FONT * EM + 1 <= width;
    if (!fits) {
      if (bar.text) { bar.text.remove(); bar.text = null; }
      return;
    }
    if (!bar.text) {
      const y = parseFloat(bar.node.getAttribute("y")) + parseFloat(bar.node.getAttribute("height")) / 2;
      const fill = dark(bar.node.getAttribute("fill")) ? "#ffffff" : "#222222";
      bar.text = element("text", { y, fill, "font-size": FONT, "text-anchor": "middle",
        "dominant-baseline": "central", "pointer-events": "none" }, bar.label);
      bar.node.after(bar.text);
    }
    bar.text.setAttribute("x", x + width / 2);
  }

  function draw(picture, zoom) {
    const total = picture.total + picture.width * (zoom - 1);
    picture.svg.setAttribute("width", total);
    picture.svg.setAttribute("viewBox", `0 0 ${total} ${picture.height}`);
    picture.svg.firstElementChild.setAttribute("width", total);
    const move = (x) => picture.left + (x - picture.left) * zoom;
    for (const bar of picture.bars) {
      bar.node.setAttribute("x", move(bar.x));
      bar.node.setAttribute("width", bar.width * zoom);
      drawLabel(bar, move(bar.x), bar.width * zoom);
    }
    for (const area of picture.areas) {
      area.node.setAttribute("points", area.points.map(([x, y]) => `${move(x)},${y}`).join(" "));
    }
    drawTicks(picture, zoom);
  }

  const groups = new Map();
  for (const pane of document.querySelectorAll(".pane")) {
    const key = pane.dataset.scale;
    if (!groups.has(key)) groups.set(key, { panes: [], zoom: 1 });
    const group = groups.get(key);
    group.panes.push({ pane, pictures: [...pane.querySelectorAll("svg")].map(remember) });
  }

  function zoomTo(group, zoom, at) {
    const before = group.zoom;
    group.zoom = Math.min(200, Math.max(0.02, zoom));
    for (const { pane, pictures } of group.panes) {
      const offset = at === undefined ? pane.clientWidth / 2 : at;
      const left = pictures[0].left;
      const held = (pane.scrollLeft + offset - left) / before;
      pictures.forEach((picture) => draw(picture, group.zoom));
      pane.scrollLeft = held * group.zoom + left - offset;
    }
  }

  for (const group of groups.values()) {
    zoomTo(group, 1);
    for (const { pane, pictures } of group.panes) {
      pane.addEventListener("scroll", () => {
        for (const other of group.panes) if (other.pane !== pane) other.pane.scrollLeft = pane.scrollLeft;
        pictures.forEach((picture) => picture.side.setAttribute("transform", `translate(${pane.scrollLeft},0)`));
      });
      pane.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        const at = event.clientX - pane.getBoundingClientRect().left;
        zoomTo(group, group.zoom * Math.pow(1.0015, -event.deltaY), at);
      }, { passive: false });
      const buttons = pane.previousElementSibling;
      const fit = () => (pane.clientWidth - (pictures[0].total - pictures[0].width)) / pictures[0].width;
      const actions = { in: () => group.zoom * 1.5, out: () => group.zoom / 1.5, fit };
      for (const button of buttons.querySelectorAll("button")) {
        button.addEventListener("click", () => zoomTo(group, actions[button.dataset.zoom]()));
      }
    }
  }
})();
