"""Debian's chromium, headless, for tests that open a page in a real browser."""

import os
import shutil
import tempfile
from contextlib import contextmanager

import pytest


@contextmanager
def chromium():
    """Yields a selenium driver that logs the console; skips the test if a program is missing."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed: pip install selenium"
    )
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("no chromium or chromedriver: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = programs[0]
        arguments = ["--headless=new", "--disable-dev-shm-usage", "--disable-background-networking"]
        arguments += ["--no-first-run", f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # chromium's sandbox does not start as root
        for argument in arguments:
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options, webdriver.ChromeService(programs[1]))
        try:
            yield driver
        finally:
            driver.quit()


def resize(browser, width, height=800):
    """Sets the size of the page in pixels, without the minimum width of a window."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def prefer(browser, scheme):
    """Sets the color scheme that the user prefers, "light" or "dark"."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def console(browser):
    """Returns the messages in the console since the last call, with the errors of the page."""
    return [entry["message"] for entry in browser.get_log("browser")]


def overflow(browser):
    """Returns by how many pixels the page is wider than the window."""
    return browser.execute_script(
        "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
    )
