"""A window to chat with a bundle: python -m examples.desktop.window [BUNDLE]"""

from __future__ import annotations

import os
import re
import sys

from PySide6 import QtGui, QtWidgets
from PySide6.QtCore import Qt

from examples.desktop.worker import Worker


class Window(QtWidgets.QMainWindow):
    def __init__(self) -> None:
        super().__init__()
        self.setWindowTitle("ondevice")
        self.resize(640, 480)
        self.worker = Worker()
        self.worker.progress.connect(self.show_progress)
        self.worker.said.connect(self.show_text)
        self.worker.ended.connect(self.show_end)
        self.choose = QtWidgets.QPushButton("Choose a bundle\N{HORIZONTAL ELLIPSIS}")
        self.choose.clicked.connect(self.choose_bundle)
        self.get = QtWidgets.QPushButton("Download\N{HORIZONTAL ELLIPSIS}")
        self.get.clicked.connect(self.choose_repository)
        self.think = QtWidgets.QCheckBox("Think first")
        self.bar = QtWidgets.QProgressBar()
        self.replies = Replies()
        self.line = QtWidgets.QLineEdit()
        self.line.returnPressed.connect(self.send)
        self.button = QtWidgets.QPushButton()
        self.button.clicked.connect(self.send_or_stop)
        self.status = QtWidgets.QLabel("no bundle yet", wordWrap=True)
        self.setCentralWidget(QtWidgets.QWidget())
        grid = QtWidgets.QGridLayout(self.centralWidget())
        grid.addWidget(self.choose, 0, 0)
        grid.addWidget(self.get, 0, 1)
        grid.addWidget(self.bar, 0, 2)
        grid.addWidget(self.think, 0, 3)
        grid.addWidget(self.replies, 1, 0, 1, 4)
        grid.addWidget(self.line, 2, 0, 1, 3)
        grid.addWidget(self.button, 2, 3)
        grid.addWidget(self.status, 3, 0, 1, 4)
        grid.setColumnStretch(2, 1)
        self.set_busy(False)

    def choose_bundle(self) -> None:
        if bundle := QtWidgets.QFileDialog.getExistingDirectory(self, "A bundle", os.environ.get("ONDEVICE_HOME", "")):
            self.open(bundle)

    def choose_repository(self) -> None:
        text = "A bundle on the Hugging Face hub, OWNER/NAME:"
        repository, accepted = QtWidgets.QInputDialog.getText(self, "Download", text)
        if accepted and repository.strip():
            self.replies.clear()
            self.set_busy(True)
            self.worker.download(repository.strip())

    def open(self, bundle: str) -> None:
        self.replies.clear()
        self.set_busy(True)
        self.worker.open(bundle)

    def send_or_stop(self) -> None:
        self.worker.stop() if self.busy else self.send()

    def send(self) -> None:
        if not self.busy and (text := self.line.text().strip()):
            self.line.clear()
            self.replies.begin(text)
            self.set_busy(True)
            self.worker.ask(text, self.think.isChecked())

    def show_progress(self, stage: str, share: float) -> None:
        self.bar.setVisible(share < 1)
        self.bar.setValue(round(100 * share))
        self.status.setText(stage)

    def show_text(self, answer: str, thoughts: str, figures: str) -> None:
        self.replies.append(answer, thoughts)
        self.status.setText(figures)

    def show_end(self, line: str) -> None:
        self.set_busy(False)
        self.status.setText(line)

    def set_busy(self, busy: bool) -> None:
        self.busy = busy
        self.button.setText("Stop" if busy else "Send")
        self.choose.setDisabled(busy)
        self.get.setDisabled(busy)
        self.bar.hide()
        self.line.setFocus()

    def closeEvent(self, event: QtGui.QCloseEvent) -> None:  # noqa: N802
        self.hide()  # hide at once: a running reply takes a moment to end
        self.worker.close()
        event.accept()


class Replies(QtWidgets.QScrollArea):
    """The conversation, with thoughts folded; shows the newest text unless the user has scrolled up."""

    def __init__(self) -> None:
        super().__init__()
        self.setWidgetResizable(True)
        self.clear()
        self._follows = True
        bar = self.verticalScrollBar()
        bar.valueChanged.connect(lambda value: setattr(self, "_follows", value == bar.maximum()))
        bar.rangeChanged.connect(lambda _, most: bar.setValue(most) if self._follows else None)

    def clear(self) -> None:
        inner = QtWidgets.QWidget()
        self.column = QtWidgets.QVBoxLayout(inner)
        self.column.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.setWidget(inner)

    def begin(self, question: str) -> None:
        self._label(question).setStyleSheet("font-weight: bold")
        self.fold = QtWidgets.QCheckBox("Thoughts")
        self.column.addWidget(self.fold)
        self.thoughts, self.answer, self.text = self._label(""), self._label(""), ""
        self.answer.setTextFormat(Qt.TextFormat.RichText)
        self.thoughts.hide()
        self.fold.hide()
        self.fold.toggled.connect(self.thoughts.setVisible)

    def append(self, answer: str, thoughts: str) -> None:
        self.text += answer
        self.answer.setText(formatted(self.text))
        self.thoughts.setText(self.thoughts.text() + thoughts)
        self.fold.setVisible(bool(self.thoughts.text()))

    def _label(self, text: str) -> QtWidgets.QLabel:
        label = QtWidgets.QLabel(text, wordWrap=True, textFormat=Qt.TextFormat.PlainText)  # never read text as markup
        label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.column.addWidget(label)
        return label


def formatted(text: str) -> str:
    """Markdown as rich text. HTML in it stays what it is, and of a picture only its text is left: Qt would open a file
    of that name, on Windows also one of another computer.
    """
    document = QtGui.QTextDocument()
    document.setMarkdown(text, QtGui.QTextDocument.MarkdownFeature.MarkdownNoHTML)
    return re.sub(r'<img (?:[^>]* alt="([^"]*)")?[^>]*>', r"\1", document.toHtml())


def main() -> int:
    application = QtWidgets.QApplication(sys.argv)
    window = Window()
    window.show()
    for bundle in sys.argv[1:2]:
        window.open(bundle)
    return application.exec()


if __name__ == "__main__":
    sys.exit(main())
