"""The yardstick: one job a request as the tutorials show it, with FastAPI, pydantic and SQLAlchemy sessions."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID, uuid4

from fastapi import Depends, FastAPI
from pydantic import BaseModel, ConfigDict
from sqlalchemy import JSON, func
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

engine = create_async_engine(os.environ["TEXTBOOK_URL"].replace("postgresql://", "postgresql+psycopg://"), pool_size=20)
sessions = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase):
    """The tables."""


class Job(Base):
    """A job."""

    __tablename__ = "textbook_jobs"

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    queue: Mapped[str] = mapped_column(index=True)
    kind: Mapped[str]
    state: Mapped[str] = mapped_column(default="available", index=True)
    args: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class NewJob(BaseModel):
    """What is sent."""

    queue: str
    kind: str
    args: dict[str, Any]


class Receipt(BaseModel):
    """What is answered."""

    model_config = ConfigDict(from_attributes=True)

    id: UUID
    queue: str
    kind: str
    state: str


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """The table, when it is not there."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield


app = FastAPI(lifespan=lifespan)


async def session() -> AsyncIterator[AsyncSession]:
    """One a request."""
    async with sessions() as opened:
        yield opened


@app.post("/v1/jobs", status_code=201, response_model=Receipt)
async def enqueue(new: NewJob, db: Annotated[AsyncSession, Depends(session)]) -> Job:
    """Insert, commit, answer."""
    job = Job(**new.model_dump())
    db.add(job)
    await db.commit()
    return job
