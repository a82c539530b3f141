# The public names of this package, which load when they are first used; this list is the only one.

from .consent import Consent as Consent
from .example_level import ExampleWork as ExampleWork
from .layerwise import LayerwiseClient as LayerwiseClient
from .mod import PrivateClientApp as PrivateClientApp
from .mod import PrivateUpdates as PrivateUpdates
from .serving import AnyClient as AnyClient
from .serving import OneClient as OneClient
from .source import ClientData as ClientData
from .source import ClientSource as ClientSource
from .source import PartitionedSource as PartitionedSource
from .updates import LocalWork as LocalWork
