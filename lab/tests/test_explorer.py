"""The expert explorer: data, escaping, and the page in a real browser."""

import json
import re
from dataclasses import replace

import pytest
import torch
from browser import console, overflow, prefer, resize
from moe_lab.analysis.experts import expert_reports
from moe_lab.analysis.explorer import ExpertPage
from moe_lab.analysis.routed_text import NO_WORD, RoutedText, joined
from moe_lab.data import Vocabulary

HOSTILE = [
    "</script><script>window.hacked=1</script>",
    "<img/src=x/onerror=window.hacked=1>",
    "<!--<script>",
    "&lt;b&gt;",
    "\"'`${window.hacked=1}\\",
    "\u202eabc",  # a right-to-left override
    "x" * 300,
]
TITLE = "</title><script>window.hacked=1</script>\u2028 & more"
WORDS = [*HOSTILE, "<unk>", "</s>", "Paris", "the", "other", "rare", *(f"w{i}" for i in range(50))]
NUM_EXPERTS, K = 12, 3


def one_sentence(words, expert, gate, num_experts):
    """Makes a RoutedText of one sentence; expert and gate are [N, k]."""
    padded = torch.full((len(words) + 4,), NO_WORD)
    padded[2:-2] = words
    position = torch.arange(len(words)).repeat_interleave(expert.shape[1])
    windows = padded.unfold(0, 5, 1)
    return RoutedText(num_experts, windows, position, expert.flatten(), gate.flatten())


def random_text(vocab_size, num_experts, k, num_sentences, length=9):
    """Routes word w to experts w % E, (w + 1) % E, ...; the first has the highest gate."""
    generator = torch.Generator().manual_seed(1)
    sentences = []
    for _ in range(num_sentences):
        words = torch.randint(vocab_size, (length,), generator=generator)
        expert = (words.unsqueeze(1) + torch.arange(k)) % num_experts
        gate = torch.rand(length, k, generator=generator).sort(1, descending=True).values
        gate /= gate.sum(1, keepdim=True)
        # A RoutedText has the experts of a token in any order.
        order = torch.randperm(k, generator=generator)
        sentences.append(one_sentence(words, expert[:, order], gate[:, order], num_experts))
    return joined(sentences)


def as_html(routed, reports, vocabulary, title, **options):
    """Makes the page of one layer."""
    page = ExpertPage(vocabulary.words, title, pieces=False, **options)
    page.add_layer("layer 0", routed, reports)
    return page.html()


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(WORDS)


@pytest.fixture(scope="module")
def routed():
    return random_text(len(WORDS), NUM_EXPERTS, K, num_sentences=60)


@pytest.fixture(scope="module")
def reports(routed, vocabulary):
    """Makes reports with all words and only two contexts of each expert."""
    return expert_reports(routed, vocabulary.words, num_words=99, num_contexts=2)


@pytest.fixture(scope="module")
def html(routed, reports, vocabulary):
    return as_html(routed, reports, vocabulary, TITLE, num_sentences=40)


def data_of(html, layer=0):
    """Returns the data of the page and of one of its layers."""
    (text,) = re.findall('<script type="application/json" id="data">(.*)</script>', html)
    data = json.loads(text)
    return {**data, **data["layers"][layer]}


def test_data_equals_the_reports(html, routed, reports):
    data = data_of(html)
    words = data["words"]
    assert data["tokens"] == 540 and data["experts_per_token"] == K and data["title"] == TITLE
    assert len(set(words)) == len(words)
    for report, expert in zip(reports, data["experts"], strict=True):
        assert expert["number"] == report.expert
        for name in ("share", "information", "purity"):
            assert expert[name] == pytest.approx(getattr(report, name), abs=1e-4)
        assert [(words[w], times) for w, times, _ in expert["words"]] == [
            (word.word, word.times) for word in report.words
        ]
        assert [tuple(words[w] for w in context[1:]) for context in expert["contexts"]] == [
            context.words for context in report.contexts
        ]
        gates = routed.gate[routed.expert == report.expert]
        assert expert["gates"] == torch.histc(gates, 20, 0, 1).int().tolist()


def test_sentences_show_the_routing(html, routed):
    data = data_of(html)
    spelling = data["words"]
    # Maps the words of a sentence to the experts and gates of its tokens. All sentences differ.
    expected = {}
    for begin in range(0, 540, 9):
        words = tuple(WORDS[w] for w in routed.words[begin : begin + 9])
        slots = [(routed.position == p).nonzero().flatten() for p in range(begin, begin + 9)]
        expected[words] = [
            sorted(zip(routed.expert[s].tolist(), routed.gate[s].tolist(), strict=True))
            for s in slots
        ]
    assert len(data["sentences"]) == 40
    for sentence in data["sentences"]:
        tokens = sentence["tokens"]
        expected_slots = expected.pop(tuple(spelling[word] for word, *_ in tokens))  # no duplicates
        for (_, *choices), slots in zip(tokens, expected_slots, strict=True):
            assert choices[1::2] == sorted(choices[1::2], reverse=True)
            assert sorted(choices[::2]) == [expert for expert, _ in slots]
            assert dict(zip(choices[::2], choices[1::2], strict=True)) == pytest.approx(
                dict(slots), abs=1e-4
            )


def test_the_same_text_gives_the_same_page(html, routed, reports, vocabulary):
    assert as_html(routed, reports, vocabulary, TITLE, num_sentences=40) == html
    all_sentences = as_html(routed, reports, vocabulary, TITLE, num_sentences=1_000)
    assert len(data_of(all_sentences)["sentences"]) == 60
    assert data_of(as_html(routed, reports, vocabulary, "", num_sentences=0))["sentences"] == []


def page_with(text, position):
    """Makes a page that has a text in a position, and harmless text elsewhere."""
    texts = dict.fromkeys(("title", "layer", "word", "pair"), "harmless") | {position: text}
    vocabulary = Vocabulary(["<unk>", "</s>", "".join(texts["word"].split())])
    routed = random_text(3, NUM_EXPERTS, K, num_sentences=4)
    routed = with_pairs(routed, texts["pair"])
    page = ExpertPage(vocabulary.words, texts["title"], pieces=False)
    for name in (texts["layer"], "second"):
        page.add_layer(name, routed, expert_reports(routed, vocabulary.words))
    return page.html()


LOADS = ["src=", "@import", "url(", "import(", "fetch(", "innerHTML", "http-equiv=refresh"]


@pytest.mark.parametrize("position", ["title", "layer", "word", "pair"])
def test_no_text_is_part_of_the_page(position):
    """All text is in the data of the page, as JSON without the characters of HTML."""

    def parts(text):
        before, data = re.split('(?<=id="data">)', page_with(text, position))
        data, after = data.split("</script>", 1)
        return data, before + after

    template = parts("harmless")[1]
    assert not any(load in template for load in LOADS)
    assert "://" not in template.replace("http://www.w3.org/2000/svg", "")
    for text in (*HOSTILE, TITLE, "`", "'", '"', "-->", "</SCRIPT >", "{{data}}"):
        data, page = parts(text)
        assert page == template and data.isascii() and not set("<>&") & set(data)
        shown = "".join(text.split()) if position == "word" else text
        assert json.dumps(shown) in json.dumps(json.loads(data))


def test_tokens_without_an_expert_are_shown(vocabulary):
    text = random_text(len(WORDS), NUM_EXPERTS, K, num_sentences=1)
    kept = text.position != 4
    text = replace(
        text, position=text.position[kept], expert=text.expert[kept], gate=text.gate[kept]
    )
    data = data_of(as_html(text, expert_reports(text, vocabulary.words), vocabulary, ""))
    assert [len(token) for token in data["sentences"][0]["tokens"]] == [7] * 4 + [1] + [7] * 4


def with_pairs(routed, name="en-fr"):
    """Assigns sentences to two language pairs in turn."""
    pair = torch.arange(len(routed.windows)) // 9 % 2
    return replace(routed, pair=pair, pair_names=(name, "en-de"))


# Tests in a browser


def expert_numbers(browser):
    """Returns the expert of each row of the table."""
    return browser.execute_script(
        "return [...document.querySelectorAll('#rows tbody tr')].map(r => +r.dataset.expert)"
    )


def search_for(browser, text):
    box = browser.find_element("id", "query")
    box.clear()
    box.send_keys(text)
    return expert_numbers(browser)


def visible_words(browser):
    return browser.find_elements("css selector", "#lines a")


@pytest.fixture
def page(browser, html, tmp_path):
    """Opens the page; afterwards checks that it logged nothing and loaded no resource."""
    path = tmp_path / "experts.html"
    path.write_text(html, "utf-8")
    browser.get(path.as_uri())
    yield browser
    assert console(browser) == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_the_page_fits_the_window(page):
    hidden = "const rows = find('#rows'); return rows.scrollWidth - rows.clientWidth"
    for width in (375, 600, 1000, 1280):
        resize(page, width)
        assert overflow(page) == page.execute_script(hidden) == 0
    text = page.find_element("tag name", "body").text
    assert all(word in text for word in ("Load", "Gates", "Experts", "Sentences", "Legend"))


def test_hostile_text_is_not_run(page):
    assert page.find_element("id", "title").get_property("textContent") == TITLE
    for _ in range(2):  # shows more sentences
        page.find_element("css selector", "#sentences .more").click()
        shown = {word.get_property("textContent") for word in visible_words(page)}
        if set(HOSTILE) <= shown:
            break
    assert set(HOSTILE) <= shown
    assert page.execute_script("return window.hacked") is None
    assert page.find_elements("tag name", "img") == []
    assert len(page.find_elements("tag name", "script")) == 2


def test_search_finds_experts_and_sentences(page):
    paris = WORDS.index("Paris")
    paris_experts = {(paris + i) % NUM_EXPERTS for i in range(K)}
    experts_shown = search_for(page, "PARIS")
    assert paris_experts <= set(experts_shown) and len(experts_shown) < NUM_EXPERTS
    assert page.find_element("id", "found").text == f"{len(experts_shown)} experts of {NUM_EXPERTS}"
    assert {mark.text for mark in page.find_elements("tag name", "mark")} == {"Paris"}
    lines = page.find_elements("css selector", "#lines li")
    assert lines and all("Paris" in line.text for line in lines)
    # The selected expert is one of the matches.
    assert int(page.find_element("id", "expert-title").text.split()[1]) in experts_shown
    everywhere = search_for(page, "the")
    exact = search_for(page, '"the"')
    assert set(exact) < set(everywhere)  # without quotes, "the" also matches "other"
    assert set(search_for(page, '"the" paris')) == set(exact) & set(experts_shown)
    assert search_for(page, "nowhere") == []
    assert page.find_element("id", "found").text == f"0 experts of {NUM_EXPERTS}"
    assert 7 in search_for(page, "7")
    assert len(search_for(page, " ")) == NUM_EXPERTS
    assert page.find_elements("tag name", "mark") == []


def test_columns_sort_the_experts(page, html):
    experts = {expert["number"]: expert for expert in data_of(html)["experts"]}
    number, load, information, purity = page.find_elements("css selector", "#rows thead th")
    assert information.get_attribute("aria-sort") == "descending"
    for head, name, descending in (
        (load, "share", True),
        (load, "share", False),
        (purity, "purity", True),
        (number, "number", False),
        (number, "number", True),
        (information, "information", True),
    ):
        head.find_element("tag name", "button").click()
        values = [experts[number][name] for number in expert_numbers(page)]
        assert values == sorted(values, reverse=descending) and len(values) == NUM_EXPERTS
        assert head.get_attribute("aria-sort") == ("descending" if descending else "ascending")
    assert len(page.find_elements("css selector", "[aria-sort]")) == 1


def test_experts_of_a_word(page, html):
    from selenium.webdriver import ActionChains, Keys

    data = data_of(html)
    tip = page.find_element("id", "tip")
    assert not tip.is_displayed()
    first = data["sentences"][0]["tokens"]
    words = visible_words(page)

    def expected(token):
        _, *choices = token
        pairs = zip(choices[::2], choices[1::2], strict=True)
        return [(f"Expert {expert}", f"{gate:.2f}") for expert, gate in pairs]

    def shown():
        assert tip.is_displayed()
        rows = tip.find_elements("tag name", "tr")
        cells = [row.find_elements("tag name", "td")[:2] for row in rows]
        return [tuple(cell.text for cell in row) for row in cells]

    ActionChains(page).move_to_element(words[2]).perform()
    assert shown() == expected(first[2]) and len(shown()) == K
    ActionChains(page).move_to_element(page.find_element("id", "title")).perform()
    assert not tip.is_displayed()

    page.execute_script("arguments[0].focus()", words[0])
    assert shown() == expected(first[0])
    ActionChains(page).send_keys(Keys.ARROW_RIGHT).perform()
    assert page.switch_to.active_element == words[1] and shown() == expected(first[1])
    assert words[1].get_attribute("aria-describedby") == "tip"
    ActionChains(page).send_keys(Keys.TAB).perform()  # goes to the next sentence
    assert page.switch_to.active_element == words[9]
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    assert not tip.is_displayed()
    ActionChains(page).send_keys(Keys.ENTER).perform()
    expert = data["sentences"][1]["tokens"][0][1]
    assert page.find_element("id", "expert-title").text == f"Expert {expert}"


def test_a_click_goes_to_the_expert(page, html):
    from selenium.webdriver.support.ui import WebDriverWait

    def current():
        row, title = page.execute_script(  # in one call, between two changes of the page
            "return [find('#rows tr[aria-current]').dataset.expert,"
            " find('#expert-title').innerText]"
        )
        assert title == f"Expert {row}"
        return title

    def becomes(number):
        """The address changes first, then the page."""
        WebDriverWait(page, 10).until(lambda _: current() == f"Expert {number}")

    start = current()
    resize(page, 375)
    word = visible_words(page)[4]
    expert = data_of(html)["sentences"][0]["tokens"][4][1]
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", word)
    word.click()
    becomes(expert)
    assert current() != start
    assert page.current_url.endswith(f"#expert-{expert}")
    top = page.execute_script("return find('#expert').getBoundingClientRect().top")
    assert 0 <= top < 800
    next_expert = next(e for e in expert_numbers(page) if e != expert)
    page.find_element("css selector", f"#rows tr[data-expert='{next_expert}'] td").click()
    becomes(next_expert)
    page.back()
    becomes(expert)
    # A search selects another expert and does not change the address.
    assert any(expert not in search_for(page, f'"w{i}"') for i in range(50))
    assert page.find_element("id", "expert-title").text != f"Expert {expert}"
    search_for(page, " ")
    page.find_element("css selector", f"#rows tr[data-expert='{expert}'] a").click()
    becomes(expert)


def test_light_and_dark(page):
    def brightness():
        colour = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3

    toggle = page.find_element("id", "theme")
    assert brightness() > 200 and toggle.get_attribute("aria-pressed") == "false"
    toggle.click()
    assert brightness() < 60 and toggle.get_attribute("aria-pressed") == "true"
    toggle.click()
    assert brightness() > 200
    prefer(page, "dark")
    page.refresh()
    assert brightness() < 60
    page.find_element("id", "theme").click()
    assert brightness() > 200


def test_language_pairs(browser, routed, vocabulary, tmp_path):
    text = with_pairs(routed)
    reports = expert_reports(text, vocabulary.words)
    path = tmp_path / "experts.html"
    path.write_text(as_html(text, reports, vocabulary, "pairs"), "utf-8")
    browser.get(path.as_uri())
    tags = {tag.text for tag in browser.find_elements("css selector", "#lines .pair")}
    assert tags == {"en-fr", "en-de"}
    number = int(browser.find_element("id", "expert-title").text.split()[1])
    panel = browser.find_element("id", "expert").text
    (report,) = (report for report in reports if report.expert == number)
    assert f"{report.pair_information:.2f} nats" in panel
    for pair in report.pairs:
        assert f"{pair.name} {100 * pair.share:.1f}% {100 * pair.expected:.1f}%" in panel
    legend = browser.find_element("id", "legend").text
    assert "Language pairs" in legend and "Wordpieces" not in legend
    assert console(browser) == []


def test_gates_above_1_have_a_longer_axis(browser, routed, vocabulary, tmp_path):
    """DeepSeek-V3 multiplies the gates by routed_scaling_factor."""
    scaled = replace(routed, gate=2.4 * routed.gate / routed.gate.max())
    html = as_html(scaled, expert_reports(scaled, vocabulary.words), vocabulary, "scaled")
    data = data_of(html)
    assert data["gate_end"] == 3
    total = [sum(column) for column in zip(*(e["gates"] for e in data["experts"]), strict=True)]
    assert total == torch.histc(scaled.gate, 20, 0, 3).int().tolist()
    (tmp_path / "experts.html").write_text(html, "utf-8")
    browser.get((tmp_path / "experts.html").as_uri())
    ends = browser.find_elements("css selector", "#gates .along span")
    assert [end.text for end in ends] == ["0", "1.5", "3"]
    assert not browser.find_element("id", "layer").is_displayed()


CONTRASTS = """
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const luminance = (colour) => {
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4));
  return .2126 * r + .7152 * g + .0722 * b;
};
return [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() &&
    [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim())).map((element) => {
  let under = element;
  const background = () => getComputedStyle(under).backgroundColor;
  while (background() === "rgba(0, 0, 0, 0)") under = under.parentElement;
  const two = [getComputedStyle(element).color, background()].map(luminance);
  return [(Math.max(...two) + .05) / (Math.min(...two) + .05), element.outerHTML.slice(0, 90)];
}).sort(([a], [b]) => a - b)[0];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(page, scheme):
    """The contrast of text is at least 4.5:1, as WCAG 2 requires at level AA."""
    prefer(page, scheme)
    search_for(page, "w")
    least, where = page.execute_script(CONTRASTS)
    assert least >= 4.5, where


def test_controls_have_names(page):
    names = page.execute_script(
        "return [...document.querySelectorAll('button, input, svg, section')]"
        ".filter(e => e.checkVisibility()).map(e => e.ariaLabel || e.textContent.trim() ||"
        " e.labels?.[0]?.textContent.trim() || null)"
    )
    assert len(names) > 10 and None not in names
    assert page.execute_script("return document.documentElement.lang") == "en"


def test_thousands_of_experts(browser, tmp_path):
    words = [f"word{i}" for i in range(20_000)]
    vocabulary = Vocabulary(["<unk>", "</s>", *words])
    text = random_text(len(vocabulary), 4_096, 4, num_sentences=600, length=20)
    page = as_html(text, expert_reports(text, vocabulary.words), vocabulary, "many")
    assert len(page) < 4 * 2**20
    path = tmp_path / "many.html"
    path.write_text(page, "utf-8")
    browser.get(path.as_uri())
    assert len(expert_numbers(browser)) == 100
    browser.find_element("css selector", "#rows .more").click()
    assert len(expert_numbers(browser)) == 200
    known = data_of(page)
    expert = known["experts"][2_345]
    word = known["words"][expert["words"][0][0]]
    browser.execute_script(
        "const box = find('#query'); box.value = arguments[0];"
        "box.dispatchEvent(new Event('input'))",
        f'"{word}"',
    )
    numbers = expert_numbers(browser)
    assert 2_345 in numbers and len(numbers) < 100
    assert console(browser) == []
