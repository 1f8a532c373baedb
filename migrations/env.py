"""Run by Alembic. The connection is handed over by `rollbook.store.migrate`; there is no alembic.ini."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=None, transaction_per_migration=False)
with context.begin_transaction():
    context.run_migrations()
