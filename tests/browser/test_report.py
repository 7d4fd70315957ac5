"""The report in a real Chromium: all figures drawn, the config copied, nothing fetched."""

import base64
import re
from itertools import pairwise

import pytest
from rich.console import Console

from dpsweep.config.sweep import load_sweep
from dpsweep.results.figures import figures
from dpsweep.results.live import LiveView
from dpsweep.results.page import page
from dpsweep.results.web import LivePage, serve_page
from dpsweep.store.lease import LeaseHolder
from dpsweep.store.study import Study

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SEARCH = """search={method.kappa: {uniform: [0.3, 1]}, method.gamma: {log_uniform: [0.2, 3]},
    method.cut: {uniform: [0.1, 0.9]}, method.depth: {uniform: [0, 0.9]},
    train.batch_size: {choice: [64, 128, 256]}, optimizer.lr: {log_uniform: [0.3, 3]}}"""
NARROW = 380


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Thirty trials whose accuracy follows from their hyperparams; some pruned, one failed."""
    place = tmp_path_factory.mktemp("study")
    (place / "tiny.yaml").write_text(
        "name: tiny\nbase: {data: {name: digits}, model: {name: cnn_small, width: 4},"
        " privacy: {epsilon: {each: [1, 4]}}, train: {batch_size: 128, epochs: 2},"
        " optimizer: {lr: 1.0}, method: {name: fftkf}}\n"
        "search: {optimizer.lr: {log_uniform: [0.3, 3]}}\nbudget: {trials: 31}\n"
    )
    settings = [SEARCH, "confirm={top: 1, seeds: 2}", "sampler={name: random}"]
    made = Study.create(f"sqlite:///{place}/study.db", load_sweep(place / "tiny.yaml", settings))
    for number in range(34):
        asked = made.ask() if number < 30 else made.ask_to_confirm()
        how = "pruned" if number % 7 == 3 and number < 30 else "complete"
        if number == 5:
            made.tell(asked.number, "failed", reason="<img src=x onerror=alert(1)> broke")
            continue
        value = (
            0.6 + 0.3 * asked.hyperparams["method.kappa"] - 0.05 * asked.hyperparams["method.depth"]
        )
        for epoch in (1, 2):
            row = {"epoch": epoch, "step": 11 * epoch, "valid/accuracy": value * epoch / 2}
            row |= {"valid/loss": 1.0, "seconds": 1.0, "noise_multiplier": 1.0}
            made.report(asked.number, row | {"privacy/epsilon_spent": 0.99})
        made.tell(asked.number, how)
    return made


@pytest.fixture(scope="module")
def url(study, tmp_path_factory):
    place = tmp_path_factory.mktemp("page") / "report.html"
    place.write_text(page(study), encoding="utf-8")
    return place.as_uri()


DRAWN = """return [...document.querySelectorAll('.plot')].map(plot => {
  const box = plot.querySelector('svg.main-svg')?.getBoundingClientRect();
  const marks = plot.querySelectorAll('.plot-container path, .plot-container image').length;
  return [plot.id, box?.width ?? 0, box?.height ?? 0, marks]; })"""


UNFOLD = "document.querySelectorAll('details.figure').forEach(one => { one.open = true; })"


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (NARROW, "light")])
def test_every_figure_is_drawn_without_an_error_or_a_request(browser, url, study, width, scheme):
    browser.open(url, width=width, scheme=scheme)
    browser.run(UNFOLD)
    drawn = browser.wait(
        f"const all = (() => {{ {DRAWN} }})(); return all.every(one => one[3] > 5) ? all : null",
        "the figures",
    )
    assert [name for name, *_ in drawn] == [f"figure-{name}" for name in figures(study)]
    assert len(drawn) >= 11
    for name, wide, high, marks in drawn:
        assert wide > 200, name
        assert high > 100, name
        assert marks > 5, name
    assert browser.console() == []
    asked = [a for a in browser.requests() if not a.startswith(("data:", "blob:"))]
    assert asked == [url]


@pytest.mark.parametrize("width", [320, NARROW, 768])
def test_no_page_is_wider_than_its_screen(browser, url, width):
    browser.open(url, width=width)
    sizes = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert sizes == [width, width]


def test_on_a_phone_the_page_is_short_and_no_titles_collide(browser, url):
    browser.open(url, width=NARROW)
    assert browser.run("return document.documentElement.scrollHeight") < 7000
    assert browser.run("return document.querySelectorAll('details.figure[open]').length") == 2
    browser.run(UNFOLD)
    titles = browser.wait(
        """const all = [...document.querySelectorAll("#figure-slices text[class*=title]")]
          .map(t => t.getBoundingClientRect()).map(box => [box.top, box.bottom]);
        return all.length > 6 ? all : null;""",
        "the titles",
    )
    assert all(bottom <= top for (_, bottom), (top, _) in pairwise(sorted(titles)))


def test_dragging_along_an_axis_keeps_the_trials_that_pass_there(browser, url, study):
    browser.open(url)
    from selenium.webdriver.common.action_chains import ActionChains  # conftest skips without it

    place = browser.driver.find_element("id", "figure-parallel")
    browser.run("arguments[0].scrollIntoView({behavior: 'instant', block: 'center'})", place)
    points = """
      const plot = arguments[0], box = plot.getBoundingClientRect(), full = plot._fullLayout;
      return [0.98, 0.52].map(y => [full.margin.l + full.xaxis.d2p(0) - box.width / 2,
        full.margin.t + full.yaxis.d2p(y) - box.height / 2]);"""
    high, low = browser.run(points, place)

    def drag(start, end):
        actions = ActionChains(browser.driver)
        actions.move_to_element_with_offset(place, *start).click_and_hold()
        actions.move_to_element_with_offset(place, *end).release().perform()

    drag(high, low)
    kappas = [r.hyperparams["method.kappa"] for r in study.best()]
    least, most = min(kappas), max(kappas)
    kept = [k for k in kappas if 0.52 <= (k - least) / (most - least) <= 0.98]
    assert 0 < len(kept) < len(kappas)
    browser.wait(
        f"return document.getElementById('figure-parallel').dataset.kept === '{len(kept)}'",
        "the trials that pass",
    )
    assert browser.run("return document.getElementById('said').textContent").startswith(
        f"{len(kept)} of {len(kappas)}"
    )
    drag(high, high)
    browser.wait(
        f"return document.getElementById('figure-parallel').dataset.kept === '{len(kappas)}'",
        "all trials",
    )
    assert browser.console() == []


@pytest.mark.parametrize("clipboard", ["granted", "denied"])
def test_copy_puts_the_best_config_on_the_clipboard(browser, url, clipboard):
    """Also where the page may not use navigator.clipboard, as in some browsers from file://."""
    for name in ("clipboard-read", "clipboard-write"):
        browser.cdp("Browser.setPermission", permission={"name": name}, setting="granted")
    browser.open(url)
    browser.run("navigator.clipboard.writeText('before')")
    if clipboard == "denied":
        browser.run("navigator.clipboard.writeText = () => Promise.reject(new Error('not here'))")
    button = browser.driver.find_element("css selector", "button[data-copy='config-1']")
    browser.run("arguments[0].scrollIntoView({behavior: 'instant', block: 'center'})", button)
    button.click()
    browser.wait("return document.querySelector('.code.copied') !== null", "the copy")
    read = "const done = arguments[0]; navigator.clipboard.readText().then(done, e => done(`${e}`))"
    copied = browser.driver.execute_async_script(read)
    shown = browser.run("return document.getElementById('config-1').textContent")
    assert copied.rstrip() == shown.rstrip()
    assert "method:" in copied
    assert browser.run("return document.getElementById('said').textContent") == "Copied"


def test_it_prints_to_paper_and_looks_as_before_afterwards(browser, url):
    browser.open(url, scheme="dark")
    before = browser.run(DRAWN)
    answer = browser.cdp("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
    paper = base64.b64decode(answer["data"])
    assert paper.startswith(b"%PDF-")
    pages = max(int(n) for n in re.findall(rb"/Count (\d+)", paper))
    assert 4 <= pages <= 16  # 16 figures of 31 trials
    after = browser.wait(
        f"const now = (() => {{ {DRAWN} }})(); return now[0][1] > 700 ? now : null", "the screen"
    )
    assert [row[:3] for row in after] == [row[:3] for row in before]


def test_watch_web_shows_a_new_trial_in_an_open_page(browser, study):
    """The panel and the figures follow; a section that the reader opened stays open."""
    view = LiveView(study, Console(), lambda: LeaseHolder("host", 7, 0.0))
    live = LivePage(study, view)
    with serve_page(live, 0) as address:
        browser.open(address)
        browser.wait("return document.querySelectorAll('.plot svg.main-svg').length > 10", "plots")
        assert "driven by process 7" in browser.run("return document.body.innerText")
        browser.run("document.querySelector('details:not(.figure)').open = true; scrollTo(0, 900)")
        live._rests_until = 0.0
        study.tell(study.ask().number, "failed", reason="the last straw")
        browser.wait("return document.body.textContent.includes('the last straw')", "the report")
        assert browser.run("return document.querySelector('details:not(.figure)').open")
        assert browser.run("return scrollY") == 900
        drawn = browser.run(DRAWN)
        assert [name for name, *_ in drawn] == [f"figure-{name}" for name in figures(study)]
        assert all(marks > 5 for *_, marks in drawn)
        assert browser.console() == []
    browser.wait("return document.body.innerText.includes('has ended')", "the end")


def test_what_others_wrote_is_text(browser, url):
    browser.open(url)
    assert browser.run("return document.images.length") == 0
    assert "<img src=x" in browser.run("return document.body.textContent")


def test_it_is_usable_without_eyes_or_mouse(browser, url):
    browser.open(url)
    levels = browser.run(
        "return [...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    unnamed = "button:not([aria-label]), .plot:not([role=img]), table:not(:has(caption))"
    assert browser.run(f"return document.querySelectorAll({unnamed!r}).length") == 0
    for scheme in ("light", "dark"):
        browser.open(url, scheme=scheme)
        for name in ("--ink", "--soft", "--link"):
            assert contrast(browser, name) >= 4.5, (scheme, name)


def contrast(browser, name):
    """WCAG contrast of a colour of the page against the cards' background."""
    read = (
        "const probe = document.body.appendChild(document.createElement('i'));"
        "const seen = ['--card', arguments[0]].map(n => { probe.style.color = `var(${n})`;"
        "return getComputedStyle(probe).color.match(/\\d+/g).map(Number); });"
        "probe.remove(); return seen;"
    )
    light = sorted(luminance(colour) for colour in browser.run(read, name))
    return (light[1] + 0.05) / (light[0] + 0.05)


def luminance(colour):
    parts = [c / 255 for c in colour[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
