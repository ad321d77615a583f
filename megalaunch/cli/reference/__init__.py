"""The reference pages, written from the code: one file a page, each a function that gives the page's text."""
