"""The paper's plans, figures and results. Without this file any other package named paper, which an
environment may have, would come first."""
