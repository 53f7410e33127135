"""The addresses of the project, from UNISONO_REPOSITORY: the sources do not know where they are published."""

import os

from setuptools import setup

repository = os.environ.get("UNISONO_REPOSITORY", "").rstrip("/")
paths = {"Source": "", "Issues": "/issues", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}
setup(project_urls={name: repository + path for name, path in paths.items()} if repository else {})
