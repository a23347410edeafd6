import sys

from softmoe.cli import main

sys.exit(main())
