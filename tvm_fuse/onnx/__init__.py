"""ONNX files, read without TVM."""
