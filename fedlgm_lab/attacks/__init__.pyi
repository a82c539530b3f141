# The public names of this package, which load when they are first used; this list is the only one.

from .frechet import PublicClassifier as PublicClassifier
from .frechet import frechet_distance as frechet_distance
from .gan import ClassReconstruction as ClassReconstruction
from .gan import GanSettings as GanSettings
from .images import psnr as psnr
from .images import ssim as ssim
from .inception import InceptionFeatures as InceptionFeatures
from .inversion import InversionSettings as InversionSettings
from .inversion import Reconstruction as Reconstruction
from .inversion import invert as invert
from .lira import confidence_logits as confidence_logits
from .lira import likelihood_ratios as likelihood_ratios
from .lira import pooled as pooled
from .lira import random_halves as random_halves
from .membership import MembershipResult as MembershipResult
from .membership import evaluate_scores as evaluate_scores
from .mia import attack_outputs as attack_outputs
from .mia import output_scores as output_scores
from .observation import Observation as Observation
from .rmia import relative_ratios as relative_ratios
