"""onnxruntime-web in headless Chromium: the file as a visitor of a page has it."""
