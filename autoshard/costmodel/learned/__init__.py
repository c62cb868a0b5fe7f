"""A learned correction of the analytic estimate: random programs, measuring, a network, scores, a stored model."""

from .collect import SAMPLES as SAMPLES
from .collect import Collected as Collected
from .collect import collect_samples as collect_samples
from .collect import good_samples as good_samples
from .collect import read_samples as read_samples
from .collect import wanted_programs as wanted_programs
from .evaluate import WITHIN as WITHIN
from .evaluate import Score as Score
from .learn import Learned as Learned
from .learn import agreed_scores as agreed_scores
from .learn import learn_model as learn_model
from .learn import make_samples as make_samples
from .learn import one_core as one_core
from .learn import unseen_scores as unseen_scores
from .store import LearnedModel as LearnedModel
from .store import load_model as load_model
from .train import LearnOptions as LearnOptions
