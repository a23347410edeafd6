"""The page in a real browser: no error, the controls change the picture, what is shown is what the model computed.

A script added to the page plays the user, with real events, and leaves what it saw in an attribute of the document.
Needs a Chromium; skipped where there is none.
"""

import html
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from making import HOSTILE, inspection, pixels, tiny_model

from softmoe.data import to_tensor
from softmoe.inspection import record
from softmoe.inspection.page import write_inspection, write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed to open the page with")

EARLY = """<script>window.seen = [];
addEventListener("error", (e) => seen.push(String(e.message || e.target.src || e)), true);
addEventListener("unhandledrejection", (e) => seen.push(String(e.reason)));
addEventListener("securitypolicyviolation", (e) => seen.push("policy: " + e.violatedDirective));
for (const name of ["error", "warn"]) console[name] = (...what) => seen.push(what.join(" "));
</script>"""
USER = """<script>(async () => {
const out = {}, wait = (ms) => new Promise((done) => setTimeout(done, ms));
while (!document.documentElement.dataset.state) await wait(20);
try {
  const [panel, other] = document.querySelectorAll(".model"), $ = (name, at = panel) => at.querySelector("." + name);
  const canvas = $("picture"), look = () => canvas.toDataURL();
  const set = async (node, value) => { node.value = value; node.dispatchEvent(new Event("change")); await wait(50); };
  const press = async (node, key) => {
    node.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true })); await wait(20); };
  const slots = () => [...$("gallery").children].map((item) => Number(item.dataset.slot));
  const columns = (node) => [...node.children].map((part) => part.textContent).join("|");
  const feeds = (at = panel) => [...$("feeds", at).children].map((item) =>
    item.firstChild.children ? columns(item.firstChild) : item.textContent);
  const changes = async (name, act) => {
    const before = look(); await act(); await wait(60);
    for (let times = 0; look() === before && times < 20; times++) await wait(50);
    out[name] = look() !== before; };
  out.state = document.documentElement.dataset.state;
  out.panels = document.querySelectorAll(".model").length;
  out.heading = panel.querySelector("h2").textContent;
  out.caption = document.getElementById("caption").textContent;
  out.prediction = $("prediction").textContent;
  out.opened = [$("layer").value, Number($("gallery").querySelector("[aria-selected=true]").dataset.slot)];
  out.plain = $("plain").src === document.querySelector("#images img").src;
  for (const at of [panel, other]) { await set($("layer", at), "0"); $("gallery", at).children[0].click(); }
  out.slots = slots();
  await changes("next", () => $("next").click());
  out.slot = $("slot").textContent;
  await changes("previous", () => $("previous").click());
  await changes("kind", () => set($("kind"), "combine"));
  await changes("kind_back", () => set($("kind"), "dispatch"));
  await changes("stretch", () => $("stretch").click());
  await changes("stretch_back", () => $("stretch").click());
  const box = canvas.getBoundingClientRect();
  await changes("hover", () => canvas.dispatchEvent(new PointerEvent("pointermove", {
    clientX: box.left + box.width * 0.6, clientY: box.top + box.height * 0.4, bubbles: true })));
  out.hovered = $("patch-name").textContent;
  out.feeds = feeds();
  await changes("arrow", () => press(canvas, "ArrowRight"));
  out.moved = $("patch-name").textContent;
  await changes("page_down", () => press(canvas, "PageDown"));
  await set($("order"), "sharp");
  out.sharp = slots();
  await set($("order"), "flat");
  out.flat = slots();
  await set($("order"), "weight");
  out.weight = slots();
  $("gallery").children[0].click();
  await changes("gallery", () => $("gallery").children[4].click());
  out.chosen = $("gallery").querySelector("[aria-selected=true]").dataset.slot;
  $("gallery").children[4].focus();
  await changes("gallery_key", () => press($("gallery").children[4], "ArrowRight"));
  out.focused = document.activeElement.dataset.slot;
  await changes("feed", () => $("feeds").querySelector("[aria-current=false]").click());
  await changes("layer", () => set($("layer"), "1"));
  await changes("image", () => document.querySelectorAll("#images button")[2].click());
  out.pressed = document.querySelectorAll("#images button")[2].getAttribute("aria-pressed");
  out.caption_after = document.getElementById("caption").textContent;
  out.other_heading = other.querySelector("h2").textContent;
  out.other_facts = $("facts", other).textContent;
  out.other_feeds = feeds(other);
  out.hacked = window.hacked === undefined ? null : window.hacked;
  out.strangers = document.querySelectorAll("img[src=x]").length;
  out.loaded = performance.getEntriesByType("resource").map((e) => e.name).filter((name) => !name.startsWith("data:"));
  const named = (node) => node.textContent.trim() || node.getAttribute("aria-label") || node.labels?.length ||
    node.querySelector("img[alt]");
  out.unnamed = [...document.querySelectorAll("button, select, input, canvas.picture")].filter((n) => !named(n)).length;
} catch (error) { seen.push("user: " + error.stack); }
out.seen = seen;
document.documentElement.dataset.result = JSON.stringify(out);
})();</script>"""


def open_page(path, tmp_path, width=1200) -> str:
    """The document as the browser has it in the end."""
    command = [
        BROWSER,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"),
        *("--virtual-time-budget=20000", "--dump-dom", path.as_uri()),
    ]
    environment = os.environ | {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    return tiny_model(slots_per_expert=2, pool="class"), tiny_model("tokens_choice", capacity_factor=0.5)


@pytest.fixture(scope="module")
def played(models, tmp_path_factory):
    """What the user saw. The content policy is taken out, so that hostile strings meet the page's own care alone."""
    tmp_path = tmp_path_factory.mktemp("browser")
    both = [
        inspection(models[0], HOSTILE, caption=HOSTILE),
        inspection(models[1], f"second {HOSTILE}", caption=HOSTILE),
    ]
    path = write_page(both, tmp_path / "p.html", title=HOSTILE, lead=HOSTILE)
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', EARLY, path.read_text())
    path.write_text(text.replace("</body>", USER + "</body>"))
    found = re.search(r'data-result="([^"]*)"', open_page(path, tmp_path))
    assert found, "the page never came to its end"
    return json.loads(html.unescape(found.group(1)))


def routing_of(model, layer, image=0):
    with record(model) as recording, torch.inference_mode():
        model(to_tensor(pixels(3))[image : image + 1])
    return recording.routings[layer]


def test_no_error_and_no_request(played):
    """The page is ready, says nothing on the console, asks nobody for anything."""
    assert played["seen"] == []
    assert played["state"] == "ready"
    assert played["loaded"] == []


def test_hostile_strings_do_not_run(played):
    """Names with scripts in them are shown letter by letter."""
    assert played["hacked"] is None
    assert played["strangers"] == 0
    assert played["heading"] == HOSTILE
    assert played["other_heading"] == f"second {HOSTILE}"
    assert played["caption"] == f"{HOSTILE} 0"
    assert played["caption_after"] == f"{HOSTILE} 2"
    assert played["prediction"] == f"taken for {HOSTILE}"


@pytest.mark.parametrize(
    "control",
    [
        "next",
        "previous",
        "kind",
        "kind_back",
        "stretch",
        "stretch_back",
        "hover",
        "arrow",
        "page_down",
        "gallery",
        "gallery_key",
        "feed",
        "layer",
        "image",
    ],
)
def test_controls_change_the_picture(played, control):
    """Mouse and keyboard alike."""
    assert played[control]


def test_names_for_everyone(played):
    """Every control has a name for a screen reader; states are told; the focus follows the keys."""
    assert played["unnamed"] == 0
    assert played["panels"] == 2
    assert played["pressed"] == "true"
    assert played["slot"] == "slot 1 (expert 0) (of 12)"
    assert played["chosen"] == str(played["weight"][4])
    assert played["focused"] == str(played["weight"][5])
    assert (played["hovered"], played["moved"]) == (
        "Patch at row 2, column 3 is made of",
        "Patch at row 2, column 4 is made of",
    )


def test_the_shown_weights_are_the_models(played, models):
    """The slots that feed a patch, with their weights, are the layer's combine weights."""
    routing = routing_of(models[0], "encoder.blocks.2.mlp")
    combine = routing.combine_weights[0, 1 + 1 * 4 + 2].flatten().numpy()  # a class token comes first
    for line in played["feeds"]:
        slot, share = split(line)
        assert share == pytest.approx(100 * combine[slot], rel=0.08, abs=0.01)
    assert split(played["feeds"][0])[0] == combine.argmax()
    assert len(played["feeds"]) == 8


def test_the_page_opens_on_the_strongest_slot_of_the_last_layer(played, models):
    """The slot that gives most to the outputs of the first image, with the plain image beside it."""
    layers = list(inspection(models[0], "model").layers)
    given = routing_of(models[0], layers[-1]).combine_weights[0].flatten(1).mean(0)
    assert played["opened"] == [str(len(layers) - 1), int(given.argmax())]
    assert int(given.argmax()) != 0
    assert len(layers) > 1
    assert played["plain"]


def split(line):
    """(slot, percent) of the columns "slot 11||12.3 %"."""
    slot, _, percent = line.split("|")
    return int(slot.split()[1]), float(percent.removesuffix(" %"))


def test_sorting(played, models):
    """By number, by entropy both ways, and by what the slots give to the outputs."""
    routing = routing_of(models[0], "encoder.blocks.2.mlp")
    dispatch = routing.dispatch_weights[0].flatten(1).double().numpy()
    entropy = -(dispatch * np.log(dispatch)).sum(0)
    given = routing.combine_weights[0].flatten(1).double().numpy().mean(0)
    assert played["slots"] == list(range(12))
    assert np.all(np.diff(entropy[played["sharp"]]) > -0.02)
    assert np.all(np.diff(entropy[played["flat"]]) < 0.02)
    assert np.all(np.diff(given[played["weight"]]) < 0.005)


def test_sparse_panel(played, models):
    """The second model's experts: how many tokens the first holds, and who holds the patch."""
    routing = routing_of(models[1], "encoder.blocks.2.mlp", image=2)
    assert played["other_facts"] == f"Holds {int(routing.load[0])} of 16 tokens."
    holders = [n for n, row in enumerate(routing.token_of_slot_NS.tolist()) if 0 in row]
    if holders:
        assert played["other_feeds"][0].startswith(f"expert {holders[0]}")
    else:
        assert played["other_feeds"] == ["nothing: no expert took this patch"]


def test_as_written(models, tmp_path):
    """The file as it is, content policy and all, becomes ready at phone width too."""
    path = write_page([inspection(models[0], HOSTILE, caption=HOSTILE)], tmp_path / "p.html", title=HOSTILE)
    text = open_page(path, tmp_path, width=390)
    assert 'data-state="ready"' in text
    assert re.search(r'<p id="trouble"[^>]*hidden=""', text)
    assert text.count("<option") >= 2


MEASURE = """<script>addEventListener("load", () => {
  const widths = [...document.querySelectorAll("figure img")].map((picture) => picture.getBoundingClientRect().width);
  const root = document.documentElement;
  root.dataset.result = JSON.stringify({ page: root.scrollWidth, window: root.clientWidth, widths });
});</script>"""


def test_figures_at_phone_width(models, tmp_path):
    """A figure of several panels keeps a width at which its words can be read and scrolls where it is; the page as a
    whole does not."""
    pytest.importorskip("matplotlib")
    about = {"data": "none", "split": "val"}
    write_inspection([inspection(models[0], "model")], tmp_path, title="figures", about=about)
    path = tmp_path / "inspect.html"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text())
    path.write_text(text.replace(' loading="lazy"', "").replace("</body>", MEASURE + "</body>"))
    found = re.search(r'data-result="([^"]*)"', open_page(path, tmp_path, width=390))
    assert found is not None
    seen = json.loads(html.unescape(found[1]))
    assert max(seen["widths"]) > 1.5 * seen["window"]
    assert seen["page"] == seen["window"]
