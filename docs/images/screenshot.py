"""Photographs the MLflow UI of a quickstart: python docs/images/screenshot.py URL FILE.

Needs selenium (PyPI), and Debian's chromium and chromium-driver.
"""

import sys
import time
from contextlib import suppress

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1700,1000 --hide-scrollbars"
)


def main(url: str, file: str) -> None:
    """Opens the chart view, unfolds the sweep's trials, and saves what is seen."""
    options = webdriver.ChromeOptions()
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.binary_location = "/usr/bin/chromium"
    driver = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
    driver.get(f"{url}/#/experiments/1/runs?compareRunsMode=CHART")
    time.sleep(12)
    for button in driver.find_elements(By.CSS_SELECTOR, "button[aria-label*='lose']"):
        with suppress(WebDriverException):  # the assistant's panel
            button.click()
    time.sleep(2)
    name = driver.find_element(By.XPATH, "//*[contains(@href, '/runs/')]")
    ActionChains(driver).move_to_element_with_offset(
        name, -name.size["width"] // 2 - 32, 0
    ).click().perform()
    time.sleep(6)
    heading = driver.find_element(By.XPATH, "//*[starts-with(text(), 'valid')]")
    driver.execute_script("arguments[0].scrollIntoView(true)", heading)
    time.sleep(6)
    driver.save_screenshot(file)
    driver.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
