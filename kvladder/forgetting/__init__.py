"""Purges with a record: what to forget, a ledger of what is owed, signed receipts, and checks."""

from kvladder.forgetting.ledger import PurgeLedger as PurgeLedger
from kvladder.forgetting.purger import Purger as Purger
from kvladder.forgetting.receipt import Receipt as Receipt
from kvladder.forgetting.scope import PurgeScope as PurgeScope
