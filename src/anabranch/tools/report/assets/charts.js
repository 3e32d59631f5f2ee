// Charts: plotly unpacked and run, figures drawn in the page's colours, and keys and buttons to move in them.
{
  const figures = [...document.querySelectorAll("script.figure")].map((script) => JSON.parse(script.textContent));
  const packed = document.getElementById("plotly");
  const narrow = matchMedia("(max-width: 640px)");
  const coarse = matchMedia("(pointer: coarse)"); // there, dragging is how one scrolls the page
  const CONFIG = { responsive: true, displayModeBar: false, doubleClick: "reset" };

  function colour(name) {
    const [variable, opacity] = name.split("/");
    const hex = getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
    if (!opacity) return hex;
    const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${parts.join(",")},${opacity})`;
  }

  // A copy in which every colour's name has become the colour. Only fields that hold colours are looked at: a name from
  // a file stays what it is.
  function coloured(value, field) {
    if (Array.isArray(value)) return value.map((item) => coloured(item, field));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, coloured(item, name)]));
    }
    return typeof value === "string" && /color$/i.test(field) && value.startsWith("--") ? colour(value) : value;
  }

  function axis(own) {
    return { gridcolor: "--rule", linecolor: "--rule", zerolinecolor: "--soft", automargin: true, ...own };
  }

  function layout(figure) {
    const axes = Object.entries(figure.layout).filter(([name]) => /^[xy]axis/.test(name));
    const small = narrow.matches ? 11 : 13;
    return {
      ...figure.layout,
      ...Object.fromEntries(axes.map(([name, own]) => [name, axis(own)])),
      font: { family: getComputedStyle(document.body).fontFamily, size: small, color: "--ink" },
      paper_bgcolor: "--page",
      plot_bgcolor: "--page",
      hoverlabel: { align: "left", namelength: -1, bgcolor: "--panel", bordercolor: "--soft", font: { color: "--ink", size: small } },
      legend: { ...figure.layout.legend, ...(narrow.matches ? { entrywidth: 0.48, entrywidthmode: "fraction" } : {}) },
      margin: { l: narrow.matches ? 8 : 16, r: 12, t: 12, b: 12 },
      dragmode: coarse.matches ? false : "zoom",
      ...(figure.zoomed ? { xaxis: { ...axis(figure.layout.xaxis), range: figure.zoomed, autorange: false } } : {}),
    };
  }

  async function draw(figure) {
    const plot = document.querySelector(`#${figure.key} .plot`);
    figure.zoomed = plot.layout && !plot.layout.xaxis.autorange ? plot.layout.xaxis.range.slice() : null;
    await Plotly.react(plot, coloured(figure.data), coloured(layout(figure)), CONFIG);
    return plot;
  }

  function zoom(plot, factor, shift) {
    const [low, high] = plot.layout.xaxis.range;
    const middle = (low + high) / 2 + shift * (high - low);
    const half = ((high - low) / 2) * factor;
    return Plotly.relayout(plot, { "xaxis.range": [middle - half, middle + half] });
  }

  const TOOLS = {
    in: (plot) => zoom(plot, 0.5, 0),
    out: (plot) => zoom(plot, 2, 0),
    left: (plot) => zoom(plot, 1, -0.25),
    right: (plot) => zoom(plot, 1, 0.25),
    all: (plot) => Plotly.relayout(plot, { "xaxis.autorange": true }),
  };
  const KEYS = { "+": "in", "=": "in", "-": "out", "−": "out", 0: "all" };

  // The bars or points that the keys lead through, in the order of time.
  function places(figure) {
    const curves = figure.oneCurveAtATime ? figure.arrowKeySeries.slice(figure.row || 0, (figure.row || 0) + 1) : figure.arrowKeySeries;
    const found = curves.flatMap((curve) => {
      const { base, x } = figure.data[curve];
      return x.map((length, point) => ({ curve, point, at: base ? base[point] : length }));
    });
    return found.sort((one, two) => (one.at - two.at) || (one.curve - two.curve));
  }

  function walk(plot, figure, direction) {
    const found = places(figure);
    if (!found.length) return;
    figure.at = figure.at === undefined ? (direction > 0 ? 0 : found.length - 1) : figure.at + direction;
    figure.at = (figure.at + found.length) % found.length;
    point(plot, figure, found[figure.at]);
  }

  // To the next curve, at about the same time.
  function change(plot, figure, direction) {
    const before = places(figure)[figure.at || 0];
    figure.row = ((figure.row || 0) + direction + figure.arrowKeySeries.length) % figure.arrowKeySeries.length;
    const found = places(figure);
    if (!found.length || !before) return;
    const away = found.map((place) => Math.abs(place.at - before.at));
    figure.at = away.indexOf(Math.min(...away));
    point(plot, figure, found[figure.at]);
  }

  function point(plot, figure, { curve, point }) {
    const yaxis = (figure.data[curve].yaxis || "y");
    Plotly.Fx.hover(plot, [{ curveNumber: curve, pointNumber: point }], [`x${yaxis}`]);
    say(plot, figure.data[curve].customdata[point]);
  }

  function say(plot, words) {
    const plain = new DOMParser().parseFromString(words.replaceAll("<br>", ". "), "text/html").body.textContent;
    plot.closest("figure").querySelector(".spoken").textContent = plain;
  }

  function listen(plot, figure) {
    plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const across = figure.oneCurveAtATime && { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (sideways && event.shiftKey) TOOLS[sideways < 0 ? "left" : "right"](plot);
      else if (sideways) walk(plot, figure, sideways);
      else if (across) change(plot, figure, across);
      else if (event.key === "Escape") Plotly.Fx.unhover(plot);
      else if (KEYS[event.key]) TOOLS[KEYS[event.key]](plot);
      else return;
      event.preventDefault();
    });
    plot.closest("figure").querySelector(".tools").addEventListener("click", (event) => {
      const tool = event.target.closest("button")?.dataset.tool;
      if (tool) TOOLS[tool](plot);
    });
  }

  // The page allows this script by its hash; it is packed because it is three quarters air.
  async function unpack() {
    const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
    const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    const script = document.createElement("script");
    script.textContent = text;
    document.head.append(script);
    packed.remove();
    if (typeof Plotly === "undefined") throw new Error("plotly.js did not start");
  }

  async function start() {
    if (figures.length) await unpack();
    let trouble = null;
    for (const figure of figures) {
      try {
        listen(await draw(figure), figure);
      } catch (error) {
        trouble = trouble || error; // the other pictures are drawn all the same
      }
    }
    const again = () => figures.forEach(draw);
    document.addEventListener("themechange", again);
    narrow.addEventListener("change", again);
    if (trouble) throw trouble;
    document.documentElement.dataset.ready = "yes";
  }

  start().catch((error) => {
    const trouble = document.getElementById("trouble");
    trouble.hidden = false;
    trouble.textContent = `Not all pictures could be drawn (${error.message}): a browser of 2023 or later can. Tables and numbers are all here.`;
  });
}
