/* Search runs in a worker, which browsers refuse to a page that was opened from a folder.
   There, a hidden frame takes the worker's place. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.inside = null;
      this.kept = []; // what is said before the frame listens
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.onload = () => {
        frame.onload = null;
        const inside = frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = () => {
          this.inside = inside;
          this.kept.splice(0).forEach((data) => this.postMessage(data));
        };
        inside.document.body.append(script);
      };
      document.body.append(frame);
    }
    postMessage(data) {
      if (this.inside) this.inside.dispatchEvent(new MessageEvent("message", { data }));
      else this.kept.push(data);
    }
  };
}
