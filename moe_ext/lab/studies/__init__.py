"""The paper's experiments: one module for each study."""
