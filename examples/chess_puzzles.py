"""Mate in one: positions are made up as they are needed, and the chess library says what is legal and what is mate."""

from __future__ import annotations

import random

from envgrad import GRPOConfig, GRPOTrainer

try:
    import chess
except ModuleNotFoundError as error:
    raise SystemExit("this example needs a package that envgrad does not install: pip install chess") from error


def mate_in_one(rng: random.Random) -> chess.Board:
    """White's king, queen and rook against a king, at random until one move mates."""
    while True:
        board = chess.Board.empty()
        for square, piece in zip(rng.sample(chess.SQUARES, 4), "KQRk", strict=True):
            board.set_piece_at(square, chess.Piece.from_symbol(piece))
        if board.is_valid() and any(mates(board, move) for move in board.legal_moves):
            return board


def mates(board: chess.Board, move: chess.Move) -> bool:
    after = board.copy(stack=False)
    after.push(move)
    return after.is_checkmate()


class MateInOne:
    def reset(self, group_id: int) -> str:
        # The group's id is the position: siblings see one board, and no data set is needed.
        self.board = mate_in_one(random.Random(group_id))
        self.attempts_left = 3
        pieces = " ".join(f"{piece.symbol()}{chess.square_name(at)}" for at, piece in self.board.piece_map().items())
        return f"White (capitals) mates in one: {pieces}"

    def play(self, move: str) -> str:
        """
        Play a move. A move that is not legal may be tried again, three times in all.

        Args:
            move: From square to square, as in d1d8.

        Returns:
            What the move did.
        """
        self.attempts_left -= 1
        try:
            self.board.push_uci(move)
        except ValueError:
            return "not legal"
        return "mate" if self.board.is_checkmate() else "no mate"

    @property
    def done(self) -> bool:
        return bool(self.board.move_stack) or not self.attempts_left

    def get_reward(self) -> float:
        return float(self.board.is_checkmate())


def main(output_dir: str = "outputs/chess_puzzles", max_steps: int = 50) -> None:
    args = GRPOConfig(output_dir=output_dir, max_steps=max_steps, max_completion_length=96)
    GRPOTrainer("starter", args=args, environment_factory=MateInOne).train()


if __name__ == "__main__":
    main()
