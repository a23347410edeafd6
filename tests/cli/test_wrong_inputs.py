"""A hundred mistakes that people make, each answered in one line that helps."""

import shlex
from pathlib import Path

import pytest

import softmoe
from softmoe.cli import main
from softmoe.models import create_model

WRONG = [
    ("trian small_data", "did you mean 'train'?"),
    ("train smalldata", "did you mean 'small_data'?"),
    ("train nothing.py", "there is no recipe file nothing.py"),
    ("train runs/mian", "there is no run runs/mian; runs has main"),
    ("train small_data --data none/photos", "There is no folder none/photos"),
    ("train small_data --data photo", "Unknown data source 'photo'"),
    (
        "train small_data --data photo",
        "there is no folder of that name, and a source of another kind starts with one of",
    ),
    ("train small_data --data photo", "Did you mean 'photos'?"),
    ("train small_data --data folder:none", "The data folder none does not exist"),
    (
        "train small_data --data mixed",
        "has no folder 'val' (it has test, train); take it from train/ with mixed?val=0.1",
    ),
    ("train small_data --data single", "single has no images for validation: no class has two; add some, or name"),
    ("train small_data --data single --dry-run", "(in training --data.val PATH, in evaluation --split all)"),
    ("fewshot saved single", "single has no images for validation: no class has two"),
    ("fewshot saved mixed/test", "mixed/test gives the same images for 'train' and 'val': name the folder above it"),
    ("train lit_small --image saved --data pairs:photos", "the data pairs:photos has no captions"),
    ("train lit_small --image saved --data pairs:photos --dry-run", "the data pairs:photos has no captions"),
    ("train small_data --data mixed --dry-run", "has no folder 'val' (it has test, train)"),
    ("train small_data --data photos/ant", "holds images but no class folders"),
    ("train small_data --data photos?vall=0.1", "Did you mean 'val'?"),
    ("train small_data --data photos?val=3", "a share of the images from 0 to 1"),
    ("train small_data --data photos --steps ten", "--steps"),
    ("train small_data --data photos --steps 0", "steps must be at least 1, got 0"),
    ("train small_data --data photos --epochs 0", "the number of epochs must be above 0"),
    ("train small_data --data photos --stepps 10", "--steps"),
    ("train small_data --data photos --resume", "softmoe train runs/NAME"),
    ("train small_data --data photos --config x.yaml", "softmoe train FILE.py"),
    ("train small_data --data photos --weight-decay 0.1", "--optim.kernel-decay"),
    ("train small_data --data photos --gpus 2", "torchrun"),
    ("train small_data --data photos --every 5", "may mean --checkpoint.every or --evaluation.every or --log.every"),
    ("train small_data --data photos --run-name a/b", "run_name must be a plain folder name"),
    ("train small_data --data photos --lr -1", "schedule.peak must be a finite number of at least 0"),
    ("train small_data --data photos --lr abc", "error: --lr: --schedule.peak must be a number, got 'abc'"),
    ("train small_data --data photos --lr", "error: --lr: --schedule.peak needs a value"),
    ("train small_data --data photos --schedule.peak abc", "error: --schedule.peak must be a number, got 'abc'"),
    ("train small_data --data photos --device tpu", "tpu"),
    ("train lit_small --data pairs:photos", "softmoe train lit_small --image MODEL"),
    ("finetune saved", "softmoe finetune MODEL DATA"),
    ("finetune runs/mian photos", "runs has main"),
    ("finetune saved photos --image-size big", "--image-size must be pixels or HEIGHTxWIDTH"),
    ("evaluate saved", "DATA"),
    ("evaluate mian photos", "there is no folder mian; runs has main"),
    ("evaluate saved photos --split tst", "it has train, val and all"),
    ("evaluate saved photos --bath-size 3", "--batch-size"),
    ("predict saved", "give at least one image, folder or pattern"),
    ("predict nothing photos", "there is no folder nothing; runs has main"),
    ("predict saved photos --top 0", "top must be at least 1, got 0"),
    ("predict saved photos --threads 0", "threads must be at least 1, got 0"),
    ("export saved", "--to"),
    ("export saved --to pdf", "'torch-export', 'onnx', 'aoti'"),
    ("cost soft_s16", "only models with experts end in their number"),
    ("cost vit_z16", "unknown model 'vit_z16'"),
    ("soup saved --out saved", "is there already: choose another --out"),
    ("upcycle saved --experts 2 --out saved", "saved is there already: choose another --out"),
    ("sweep small_data --data photos", "softmoe sweep RECIPE lr=1e-3,3e-3"),
    ("report photos", "is not the folder of a run"),
    ("study nothing", "no study 'nothing'"),
    ("upload saved name", "looks like user/name"),
    ("train small_data photos", "data is given as softmoe train small_data --data photos"),
    ("train small_data --data photos --seed 1.5", "--seed must be a whole number, got '1.5'"),
    ("train small_data --data photos --lr fast", "--schedule.peak must be a number, got 'fast'"),
    ("quickstart --seed abc", "--seed must be a whole number, got 'abc'"),
    ("demo --out photos", "photos is there already: choose another --out, a new or an empty folder"),
    ("inspect saved photos --out photos", "photos is there already: choose another --out"),
    ("report runs/main --out photos", "photos is there already: choose another --out"),
    ("demo --pictures 1000000000000", "the number of pictures is from 1 to 288"),
    ("fewshot saved", "give at least one source of images"),
    ("evaluate saved three", "softmoe finetune MODEL DATA teaches it these"),
    ("evaluate saved photos --out photos", "--out photos is a folder; give the name of a new file"),
    ("evaluate saved photos --batch-size 0", "must have at least 1 image, got 0"),
    ("predict saved photos --csv photos/ant/0.jpg", "choose another --csv"),
    ("predict saved photos --device gpu", "it is none of auto, cpu, cuda, cuda:1 and mps"),
    ("predict empty.safetensors photos --mean 0.5 --std 0.5", "empty.safetensors is not a readable safetensors file"),
    ("cost soft_s16_99999999999999999999e", "unknown model 'soft_s16_99999999999999999999e'"),
    ("bench layer --seconds 0", "--seconds must be above 0, got 0"),
    ("-v", "unknown command '-v', did you mean '--version'?"),
    ("TRAIN small_data", "did you mean 'train'?"),
    ("train --data photos", "the recipe comes first: softmoe train small_data --data photos"),
    ("train photos", "to train on the images in it: softmoe train small_data --data photos"),
    ("train small_data", "give one with <class>/<image> in it: --data PATH"),
    ("train small_data --data empty", "empty holds no folders of images; put them at empty/<class>/<image>"),
    ("train small_data --data empty.safetensors", "is a file; images come as a folder with <class>/<image> in it"),
    ("train small_data --data one", "one has one class only, 'ant': there is nothing to tell it from"),
    ("train small_data --data one --dry-run", "one has one class only, 'ant'"),
    (r"train small_data --data 'C:\Users\me\photos'", r"There is no folder C:\Users\me\photos"),
    ("train small_data --data photos --steps", "--steps needs a value"),
    ("train small_data --data photos --steps 1e3", "--steps must be a whole number, got '1e3'"),
    ("train small_data --data photos --steps -1", "steps must be at least 1, got -1"),
    ("train small_data --data photos --epochs abc", "--epochs cannot be 'abc'"),
    ("train small_data --data photos --epochs 1 --steps 2", "give --epochs or --steps, not both"),
    ("train small_data --data photos --epochs 1 --batch-size 0", "data.batch_size must be at least 1, got 0"),
    ("train small_data --data photos --image-size 64x", "must be pixels or HEIGHTxWIDTH, like 224 or 224x320"),
    ("train small_data --data photos --image-size=0", "image_size must be positive, not 0"),
    ("train small_data --data photos --model.router sofft", "uniform_soft, or dense for none"),
    ("train small_data --data photos --model.heads 3", "heads must divide the width: 64 is not a multiple of 3"),
    ("train small_data --data photos --optim.name adm", "Expected one of ('adamw', 'sgd', 'muon')"),
    (
        "train small_data --data photos --run-name notes",
        "runs/notes holds mine.txt and no run: choose another --run-name",
    ),
    ("train small_data --data photos --run-name file", "runs/file is a file: choose another --run-name or --runs"),
    ("train small_data --data photos --runs empty.safetensors", "empty.safetensors is a file: choose another"),
    ("finetune weights.pt photos", "weights.pt is a pickle, which can run any code"),
    ("finetune demo photos --mean 0.5", "mean can be given for files of others' weights only"),
    ("evaluate saved empty", "empty holds no folders of images"),
    ("evaluate saved photos --weights int4", "invalid choice 'int4' for argument '--weights'"),
    ("predict saved empty", "the folder empty holds no images; known endings are .jpg"),
    ("predict saved 'nothing*.jpg'", "no file matches 'nothing*.jpg'"),
    ("doctor photos/ant/0.jpg", "is a file; give the folder of a saved model"),
    ("serve saved --port 99999", "--port must be from 0 to 65535, got 99999"),
    ("tokenizer tran photos", "softmoe tokenizer has the commands train and show, not 'tran'"),
    ("sweep small_data lr=a,b --data photos", "--schedule.peak must be a number, got 'a'"),
    ("sweep small_data num_experts=4,x --data photos --steps 3", "--model.num-experts cannot be 'x'"),
    ("plan soft_b16_128e --devices 8 --memory 40", "--memory must be a size like 40GB or 80GiB, got '40'"),
    ("search saved '' photos", "the text to search for is empty"),
    ("zeroshot saved photos", "saved is a model for images alone"),
    ("soup saved demo --out averaged", "only models of one architecture can be averaged"),
    ("study controls --scale huge", "Expected one of ('tiny', 'small', 'paper')"),
    ("quickstart --out page.html", "Unrecognized options: --out"),
    ("predict saved/model.safetensors photos", "is a part of a saved model: give its folder, saved"),
    ("evaluate saved photos --out photos/ant/0.jpg/page.html", "0.jpg is a file; choose another place"),
    ("predict saved photos --csv photos", "--csv photos is a folder; give the name of a new file"),
    ("predict saved photos --features photos/ant/0.jpg", "choose another --features"),
    ("bench layer --json empty.safetensors", "empty.safetensors is there already: choose another --json"),
    ("bench layer --plot photos", "--plot photos is a folder; give the name of a new file"),
    ("evaluate saved photos --workers 100000", "processes that read images: at most"),
    ("fewshot saved photos --workers 100000", "processes that read images: at most"),
    ("train small_data --data ~nobodyhere/photos", "There is no folder ~nobodyhere/photos"),
    ("evaluate saved ~nobodyhere/photos", "There is no folder ~nobodyhere/photos"),
    ("evaluate ~nobodyhere/saved photos", "there is no folder ~nobodyhere/saved"),
    ("evaluate saved 'idx:~nobodyhere/photos'", "~nobodyhere/photos"),
    ("evaluate saved 'wds:~nobodyhere/{split}.tar'", "~nobodyhere/val.tar"),
    ("search saved dog ~nobodyhere/photos", "there is no image file or folder '~nobodyhere/photos'"),
    ("export saved --to onnx --out ~nobodyhere/model.onnx", "there is no folder"),
    ("train lit_small --image saved --data pairs:~nobodyhere/x", "~nobodyhere/x"),
    ("train lit_small --image mian --data pairs:photos", "there is no folder mian; runs has main"),
    (
        "finetune demo three --num-classes 2 --dry-run",
        "three has 3 classes, some outside the model's head, which has 2",
    ),
    ("predict photos runs/main", "MODEL comes first: softmoe predict runs/main photos"),
    ("predict photos/ant/0.jpg runs/main", "MODEL comes first: softmoe predict runs/main photos/ant/0.jpg"),
    ("evaluate photos saved", "MODEL comes first: softmoe evaluate saved photos"),
    ("evaluate 'shapes?size=16' demo", "MODEL comes first: softmoe evaluate demo 'shapes?size=16'"),
    ("finetune photos demo", "MODEL comes first: softmoe finetune demo photos"),
    ("search dog saved photos", "MODEL comes first: softmoe search saved dog photos"),
    ("predict --model demo photos", "--model is not needed, the place says it: softmoe predict MODEL IMAGES"),
    ("evaluate --data=photos saved", "--data=photos is not needed, the place says it: softmoe evaluate MODEL DATA"),
    (
        "predict soft_s16_128e photos",
        "is an architecture and has no weights: softmoe train pretrain --model soft_s16_1",
    ),
    ("finetune vit_s16 photos", "vit_s16 is an architecture and has no weights"),
    ("finetune imagenet1k photos", "imagenet1k is a recipe and has no weights: softmoe train imagenet1k --data DATA"),
    ("upcycle quickstart --experts 2", "quickstart is a recipe and has no weights"),
    ("soup saved small_data --out averaged", "small_data is a recipe and has no weights"),
    ("predict demo https://example.com/cat.jpg", "https://example.com/cat.jpg is an address: download it first"),
    ("predict https://example.com/model photos", "https://example.com/model is an address: download the files"),
    ("predict nothing.safetensors photos", "there is no file nothing.safetensors"),
    ("train --recipe lit --data photos", "the recipe comes first: softmoe train lit --data photos"),
    ("train small_data --data mixed", "--data.val-split test in training, --split test in evaluation"),
    (
        "doctor runs",
        "runs is not a saved model: it has no config.json written by softmoe.save_pretrained; runs has main",
    ),
    ("report runs", "runs is not the folder of a run: it has no config.json; runs has main"),
    ("inspect", "something is missing: softmoe inspect MODEL DATA (softmoe inspect --help)"),
    ("export saved", "something is missing: softmoe export MODEL --to TO (softmoe export --help)"),
    (
        "finetune demo photos --epoch 2",
        "error: there is no --epoch, did you mean --epochs? (softmoe finetune MODEL DATA",
    ),
    ("evaluate saved photos --bath-size 3", "--bath-size, 3; did you mean --batch-size? (softmoe evaluate --help)"),
    ("train small_data --data photos --freze 0.5", "there is no --freze, did you mean --freeze?"),
    ("train small_data --data photos --wandb", "--wandb takes the name of a Weights & Biases project: --wandb NAME"),
    ("train small_data --data photos -v", "there is no --verbose: a run shows its progress by itself"),
    ("sweep small_data num_experts=4,0 --data photos --steps 3", "num_experts is from 1 to 1048576, not 0"),
    ("finetune photos vit.safetensors --mean 0.5", "MODEL comes first: softmoe finetune vit.safetensors photos"),
    ("report runs/mian", "there is no folder runs/mian; runs has main"),
    ("train runs", "runs is not the folder of a run: it has no config.json; runs has main"),
    ("train small_data --data runs/notes", "runs/notes holds no folders of images; put them at runs/notes/<class>/"),
    ("predict damaged photos", "damaged/config.json is not valid JSON: Expecting value"),
    ("search saved dog photos", "softmoe train lit_small --image saved --data pairs:DATA learns texts for it"),
    ("fewshot saved photos --shots 1,5", "--shots cannot be '1,5'; --shots [INT [INT ...]]"),
    ("predict saved photos --out x.csv", "softmoe predict has no --out: --csv FILE writes a table"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as people have it: photos without splits, others with train/ and test/, a saved model, a run."""
    root = tmp_path_factory.mktemp("place")
    for name in (
        "photos/ant",
        "photos/bee",
        "one/ant",
        "mixed/train/ant",
        "mixed/test/ant",
        "three/a",
        "three/b",
        "three/c",
    ):
        (root / name).mkdir(parents=True)
        for number in range(3):
            (root / name / f"{number}.jpg").write_bytes(b"x")
    for name in ("single/ant", "single/bee"):
        (root / name).mkdir(parents=True)
        (root / name / "0.jpg").write_bytes(b"x")
    for name in ("empty", "runs/notes", "damaged"):
        (root / name).mkdir(parents=True)
    (root / "damaged" / "config.json").write_text("not JSON")
    for name in ("empty.safetensors", "vit.safetensors", "weights.pt", "runs/notes/mine.txt", "runs/file"):
        (root / name).touch()
    model = create_model("soft_ti8_2e", num_classes=2, image_size=16, width=16, heads=2, mlp_dim=16, depth=1)
    for name in ("saved", "runs/main"):
        softmoe.save_pretrained(model, root / name, classes=["ant", "bee"])
    return root


@pytest.mark.parametrize(("command", "words"), WRONG, ids=[command for command, _ in WRONG])
def test_one_line_that_helps(command: str, words: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Exit code 2 and one line on stderr with the words that lead on; no traceback, and nothing is left behind."""
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    assert main(shlex.split(command)) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("softmoe: error: ")
    assert words in error[-1]
    assert all(line.startswith("softmoe: ") for line in error)
    assert sorted(place.rglob("*")) == before


def test_a_word_of_a_megabyte_is_not_said_again(capsys):
    """The line stays one that fits on a screen or two."""
    assert main(["doctor", "a" * 1_000_000]) == 2
    error = capsys.readouterr().err
    assert error.startswith("softmoe: error: ")
    assert len(error) < 5000
