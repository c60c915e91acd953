  // Shows the values of charts under the pointer. The page has them as JSON in its element `data`.
  const charts = JSON.parse(document.getElementById("data").textContent);

  function make(tag, name, text) {
    const element = document.createElement(tag);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function written(value) {
    const size = Math.abs(value);
    if (size >= 1e5) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(5)));
  }

  // Place of the point nearest to x; the places are in order.
  function nearest(places, x) {
    let low = 0, high = places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(places[low] - x) <= Math.abs(places[high] - x) ? low : high;
  }

  class Reader {
    constructor(plot) {
      this.plot = plot;
      this.chart = charts[Number(plot.closest("[data-chart]").dataset.chart)];
      this.lines = this.chart.lines;
      this.places = [...new Set(this.lines.flatMap(line => line.x))].sort((a, b) => a - b);
      this.at = this.places.length - 1;
      this.plot.addEventListener("pointermove", event => this.point(event));
      this.plot.addEventListener("pointerdown", event => this.point(event));
      this.plot.addEventListener("pointerleave", () => this.hide());
      this.plot.addEventListener("blur", () => this.hide());
      this.plot.addEventListener("keydown", event => this.key(event));
    }

    point(event) {
      const box = this.plot.getBoundingClientRect();
      const [low, high] = this.chart.x;
      this.show(nearest(this.places, low + (high - low) * (event.clientX - box.left) / box.width));
    }

    across(x) {
      const [low, high] = this.chart.x;
      return (x - low) / (high - low);
    }

    key(event) {
      const far = this.places.length - 1;
      const jump = Math.max(1, Math.round(far / 50));
      const next = {
        ArrowLeft: this.at - (event.shiftKey ? jump : 1), ArrowRight: this.at + (event.shiftKey ? jump : 1), Home: 0, End: far,
      }[event.key];
      if (event.key === "Escape") this.hide();
      if (next === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.show(Math.min(far, Math.max(0, next)));
    }

    height(value) {
      const [low, high] = this.chart.y;
      const share = this.chart.yLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
      return Math.min(1, Math.max(0, share));
    }

    show(at) {
      this.hide();
      this.at = at;
      const x = this.places[at], share = this.across(x);
      this.cursor = make("div", "cursor");
      this.cursor.style.left = 100 * share + "%";
      this.readout = make("div", "readout");
      this.readout.setAttribute("role", "status");
      const label = x.toLocaleString("en", { maximumSignificantDigits: 6 });
      this.readout.append(make("b", "", this.chart.xName + " " + label));
      for (const line of this.lines) {
        const place = nearest(line.x, x);
        // A line that is not here says nothing: its nearest point is further away than a hundredth of the chart.
        if (line.y[place] === null || Math.abs(this.across(line.x[place]) - share) > .01) continue;
        const soft = line.smooth;
        const value = soft ? line.smooth[place] : line.y[place];
        const row = make("div");
        row.append(make("i", "c" + line.color));
        if (this.lines.length > 1) row.append(make("bdi", "", line.name), " ");
        row.append(make("b", "", written(value)));
        if (line.error && line.error[place] !== null) row.append(" \u00b1 " + Number(line.error[place].toPrecision(2)));
        if (soft) row.append(" (raw " + written(line.y[place]) + ")");
        this.readout.append(row);
        const dot = make("i", "c" + line.color);
        dot.style.bottom = 100 * this.height(value) + "%";
        this.cursor.append(dot);
      }
      this.plot.append(this.cursor, this.readout);
      const width = this.plot.clientWidth, own = this.readout.offsetWidth, cursor = share * width;
      const left = cursor + 10 + own <= width ? cursor + 10 : cursor - 10 - own;
      this.readout.style.left = Math.max(0, Math.min(left, width - own)) + "px";
    }

    hide() {
      if (this.cursor) { this.cursor.remove(); this.readout.remove(); }
      this.cursor = this.readout = null;
    }
  }

  document.querySelectorAll(".plot").forEach(plot => new Reader(plot));
