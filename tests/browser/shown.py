"""What tests do with a page."""

from __future__ import annotations

from typing import Any

__all__ = ["Shown"]


class Shown:
    """A page that shows a trace."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def state(self) -> dict[str, Any]:
        """What the page says that it shows."""
        return self.page.evaluate("streamflow.state()")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def click_in_graph(self, op_id: int) -> None:
        self.page.mouse.click(**self.page.evaluate("id => streamflow.whereInGraph(id)", op_id))

    def point_on_timeline(self, op_id: int) -> None:
        self.page.mouse.move(**self.page.evaluate("id => streamflow.whereOnTimeline(id)", op_id))

    def choose(self, view: str) -> None:
        self.page.select_option("#view", view)

    def point_at_lane_title(self, op_id: int) -> None:
        box = self.page.locator("#lanes-canvas").bounding_box()
        y = self.page.evaluate("id => streamflow.whereOnTimeline(id)", op_id)["y"]
        self.page.mouse.move(box["x"] + 20, y)

    def written(self) -> set[str]:
        """Every text on the canvases, as it was drawn."""
        return set(
            self.page.evaluate(
                """async () => {
                    const found = new Set();
                    const pen = CanvasRenderingContext2D.prototype;
                    const { fillText } = pen;
                    pen.fillText = function (words, ...place) {
                        found.add(words);
                        return fillText.call(this, words, ...place);
                    };
                    for (const change of ["graph in", "graph out", "timeline in", "timeline out"]) {
                        document.querySelector(`[data-zoom="${change}"]`).click();
                    }
                    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
                    pen.fillText = fillText;
                    return [...found];
                }"""
            )
        )

    def pixels(self, canvas: str, x: float, y: float, width: int = 1, height: int = 1) -> set[str]:
        """The colours in a part of a canvas, once it is drawn."""
        return set(
            self.page.evaluate(
                """async ([canvas, ...box]) => {
                    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
                    const copy = new OffscreenCanvas(box[2], box[3]);
                    const pen = copy.getContext("2d", { willReadFrequently: true });
                    const [x, y] = box.map(Math.round);
                    pen.drawImage(document.getElementById(canvas), -x, -y);
                    const { data } = pen.getImageData(0, 0, box[2], box[3]);
                    const found = new Set();
                    for (let i = 0; i < data.length; i += 4) {
                        if (data[i + 3] === 255) {
                            const parts = [...data.subarray(i, i + 3)];
                            const spell = (part) => part.toString(16).padStart(2, "0");
                            found.add(parts.map(spell).join(""));
                        } else if (data[i + 3]) found.add("faint");
                    }
                    return [...found];
                }""",
                [canvas, x, y, width, height],
            )
        )

    def in_canvas(self, canvas: str, op_id: int) -> tuple[float, float]:
        """Where the middle of an op is, from the canvas's corner."""
        where = {"graph-canvas": "whereInGraph", "lanes-canvas": "whereOnTimeline"}[canvas]
        place = self.page.evaluate(f"id => streamflow.{where}(id)", op_id)
        box = self.page.locator(f"#{canvas}").bounding_box()
        return place["x"] - box["x"], place["y"] - box["y"]

    def focused(self) -> str:
        return self.page.evaluate("document.activeElement.id")

    def panel(self) -> str:
        return self.page.inner_text("#panel")

    def announced(self) -> str:
        return self.page.inner_text("#announce")
