"""The pages in a real Chromium: they fit, they are quiet, they can be used by keyboard and by ear.

make test-browser          pytest -q -m browser tests/browser

Needs the extra `browser` and a Chromium of the system (Debian: apt-get install chromium), found by name or by
EYAS_CHROMIUM.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiny_runs import HOSTILE, two_runs

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PAGES = ("one", "two", "begun", "training", "doctor")
DRAWN = ("one", "two", "training")
PLOTS = ["Acceptance by drafted position", "Loss by unrolled step", "Predicted accept length",
         "Coverage by size of the draft vocabulary"]  # fmt: skip


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = os.environ.get("EYAS_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert path, f"no Chromium is installed (looked for {', '.join(NAMES)}): apt-get install chromium, or EYAS_CHROMIUM"
    with sync_playwright() as driver:
        # Without its sandbox, which containers and root do not have; the pages are our own.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pages(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each page as a file: a run, two, one that has just begun, a training alone, a diagnosis."""
    from eyas.report.diagnosis_html import render as render_diagnosis
    from eyas.report.run import read_report
    from eyas.report.run_html import render
    from test_report_diagnosis import FULL

    first, second = two_runs(tiny_target, tmp_path_factory)
    out = tmp_path_factory.mktemp("pages")
    begun = out / "begun"
    begun.mkdir()
    told = json.loads((first / "stages.json").read_text())
    told["stages"] = {name: told["stages"][name] for name in ("target", "prompts")}
    (begun / "stages.json").write_text(json.dumps(told))
    texts = {
        "one": render(read_report([first])),
        "two": render(read_report([first, second])),
        "begun": render(read_report([begun])),
        "training": render(read_report([first / "train"])),
        "doctor": render_diagnosis(FULL),
    }
    for name, text in texts.items():
        (out / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: out / f"{name}.html" for name in texts}


@pytest.fixture
def show(chromium: Any, pages: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Open a page; at the end of the test it must have been quiet: no console, no error, no dialog, no request."""
    opened: list[Any] = []
    heard: list[str] = []

    def open_page(name: str, width: int = 1440, scheme: str = "light", **options: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        opened.append(context)
        page = context.new_page()
        page.on("console", lambda message: heard.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: heard.append(f"error: {error}"))
        page.on("dialog", lambda dialog: heard.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: heard.append(f"request: {request.url}"))
        page.goto(pages[name].as_uri())
        assert heard.pop(0) == f"request: {pages[name].as_uri()}", "the page itself"
        return page

    yield open_page
    for context in opened:
        context.close()
    assert heard == []


def pixels(page: Any, name: str) -> str:
    """What the plot's canvas shows, once it has been drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return str(page.locator(f'figure[data-plot="{name}"] canvas').evaluate("(canvas) => canvas.toDataURL()"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1440])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_follows_the_scheme(show: Callable[..., Any], name: str, width: int, scheme: str) -> None:
    page = show(name, width, scheme)
    for details in page.locator("summary").all():  # also what is folded must fit
        details.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate(
        "(width) => [...document.querySelectorAll('body *')].filter((node) => !node.closest('.box, .hidden, .canvas')"
        " && node.getClientRects().length && node.getBoundingClientRect().right > width + 1).map((n) => n.outerHTML)",
        width,
    )
    assert [part[:200] for part in cut] == []
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(x) for x in paper[paper.index("(") + 1 : -1].split(",")[:3])
    assert brightness > 700 if scheme == "light" else brightness < 100
    if name in DRAWN:
        assert page.locator("figure canvas").count() == page.locator("figure").count() > 0


@pytest.mark.parametrize(("width", "scheme"), [(375, "light"), (1440, "dark")])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(show: Callable[..., Any], name: str, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = show(name, width, scheme)
    for details in page.locator("summary").all():
        details.click()
    found = Axe().run(page)
    told = [(v["id"], [node["html"][:120] for node in v["nodes"]][:3]) for v in found.response["violations"]]
    assert told == []
    assert len(found.response["passes"]) > 15, "axe did run"


@pytest.mark.parametrize("name", PAGES)
def test_landmarks_and_headings(show: Callable[..., Any], name: str) -> None:
    page = show(name)
    for role in ("banner", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1, role
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((node) => Number(node.tagName[1]))")
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), levels
    captions = page.evaluate("[...document.querySelectorAll('table')].map((t) => t.caption?.textContent || '')")
    assert captions and all(captions)


def test_every_plot_has_a_name_and_controls_with_names(show: Callable[..., Any]) -> None:
    page = show("one")
    for title in PLOTS:
        figure = page.get_by_role("figure", name=title)
        assert figure.count() == 1
        assert figure.get_by_role("img", name=title).count() == 1
        assert figure.get_by_role("slider", name=f"Read the plot at a point: {title}").count() == 1
        assert figure.get_by_role("group", name=f"Curves of the plot: {title}").count() == 1
    loss = page.get_by_role("figure", name="Loss by unrolled step")
    assert loss.get_by_role("checkbox").count() == 2
    assert loss.get_by_role("checkbox", name="step 1").is_checked()


def test_a_checkbox_takes_its_curve_away_and_brings_it_back(show: Callable[..., Any]) -> None:
    page = show("one")
    box = page.get_by_role("figure", name="Loss by unrolled step").get_by_role("checkbox", name="step 2")
    whole = pixels(page, "loss")
    box.focus()
    page.keyboard.press("Space")
    assert not box.is_checked() and pixels(page, "loss") != whole
    page.keyboard.press("Space")
    assert box.is_checked() and pixels(page, "loss") == whole


def test_the_slider_reads_the_values_of_a_point(show: Callable[..., Any]) -> None:
    page = show("one")
    spec = json.loads(page.locator("#plots").text_content())["loss"]
    slider = page.get_by_role("slider", name="Loss by unrolled step")

    def said(i: int) -> str:
        values = ", ".join(f"{s['label']} {s['values'][i]:.3f}" for s in spec["series"])
        return f"tokens seen {spec['x'][i]:,}: {values}"

    assert slider.get_attribute("aria-valuetext") == said(len(spec["x"]) - 1)
    slider.focus()
    for step in (2, 3):
        page.keyboard.press("ArrowLeft")
        assert slider.get_attribute("aria-valuetext") == said(len(spec["x"]) - step)
    page.keyboard.press("Home")
    assert slider.get_attribute("aria-valuetext") == said(0)
    visible = page.get_by_role("figure", name="Loss by unrolled step").locator(".curves .value").all_inner_texts()
    assert visible == [f"{s['values'][0]:.3f}" for s in spec["series"]]


def test_the_mouse_reads_values_and_zooms_and_a_button_shows_all(show: Callable[..., Any]) -> None:
    page = show("one")
    figure = page.get_by_role("figure", name="Loss by unrolled step")
    figure.scroll_into_view_if_needed()
    area, slider = figure.locator(".u-over").bounding_box(), figure.get_by_role("slider")
    last = slider.get_attribute("aria-valuetext")
    y = area["y"] + area["height"] / 2
    page.mouse.move(area["x"] + 3, y)
    assert slider.get_attribute("aria-valuetext") != last
    whole, button = pixels(page, "loss"), figure.get_by_role("button", name="Show all")
    assert button.count() == 0
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] / 2, y, steps=4)
    page.mouse.up()
    page.mouse.move(5, 5)
    assert pixels(page, "loss") != whole
    button.click()
    assert pixels(page, "loss") == whole and button.count() == 0


@pytest.mark.parametrize("name", ["one", "two", "doctor"])
def test_tab_reaches_every_control_in_order_and_shows_where_it_is(show: Callable[..., Any], name: str) -> None:
    page = show(name)
    page.evaluate(
        "() => [...document.querySelectorAll('a[href],summary,input,button,[tabindex=\"0\"]')]"
        ".filter((node) => node.checkVisibility()).forEach((node, i) => { node.dataset.place = i; })"
    )
    count = page.locator("[data-place]").count()
    reached = []
    for _ in range(count):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("Number(document.activeElement.dataset.place ?? -1)"))
        style = page.evaluate("(() => { const s = getComputedStyle(document.activeElement); return "
                              "[s.outlineStyle, parseFloat(s.outlineWidth)]; })()")  # fmt: skip
        assert style[0] != "none" and style[1] >= 1, page.evaluate("document.activeElement.outerHTML")[:200]
    assert reached == list(range(count))


def test_the_colours_of_plots_follow_a_change_of_scheme(show: Callable[..., Any]) -> None:
    page = show("one")
    light = pixels(page, "loss")
    page.emulate_media(color_scheme="dark")
    dark = pixels(page, "loss")
    assert dark != light
    page.emulate_media(color_scheme="light")
    assert pixels(page, "loss") == light


def test_a_plot_follows_the_width_of_its_page(show: Callable[..., Any]) -> None:
    page = show("one", 1440)
    page.set_viewport_size({"width": 375, "height": 800})
    page.wait_for_function("document.querySelector('figure canvas').getBoundingClientRect().right <= 375")
    assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_names_and_prompts_are_text_and_no_other_script_may_run(chromium: Any, pages: dict[str, Path]) -> None:
    context = chromium.new_context()
    page = context.new_page()
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.goto(pages["two"].as_uri())
    assert HOSTILE in page.locator("h1").text_content()
    assert page.locator("img, main b, main i").count() == 0
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s);"
        " const i = document.createElement('div'); i.innerHTML = '<img src=x onerror=\"window.ran = 2\">';"
        " document.body.append(i); }"
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.ran") is None
    assert dialogs == []
    context.close()


def test_without_scripts_the_numbers_are_there(show: Callable[..., Any]) -> None:
    page = show("one", java_script_enabled=False)
    assert page.get_by_text("The plots need JavaScript").is_visible()
    assert not page.locator(".canvas").first.is_visible(), "no empty frames"
    figure = page.get_by_role("figure", name="Loss by unrolled step")
    figure.locator("summary").click()
    assert figure.get_by_role("table").is_visible()
    assert figure.get_by_role("row").count() == 7, "a heading, and a row a step"
