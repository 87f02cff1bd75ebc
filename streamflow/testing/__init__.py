"""Tools for testing: exploration of schedules, and the backend contract suite to subclass."""

from streamflow.testing.explore import ExplorationFailed as ExplorationFailed
from streamflow.testing.explore import Explored as Explored
from streamflow.testing.explore import explore as explore
