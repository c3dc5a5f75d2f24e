"""Every family's recipe is complete and says what its paper says; smoke runs are small."""

import pytest
from support.small_runs import sizes_of

from hsvit_jax import config as config_lib
from hsvit_jax import data, models, train
from hsvit_jax.config import recipes, variants
from hsvit_jax.models import costs
from hsvit_jax.train import init_from, step

FAMILIES = tuple(variants.siblings())


def resolved(spec, *settings):
    config = config_lib.get_config(spec, *settings)
    return config_lib.resolve(config, data.describe(config.data.name))


@pytest.mark.parametrize("data_set", ["cifar10", "digits", "imagenet"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_paper_s_recipe_leaves_nothing_to_another(family, data_set):
    """No figure of it is left over from hsvit's."""
    decided = {f"{part}.{key}" for part in ("augment", "optim") for key in recipe_of("c2a2")[part]}
    decided |= {"train.batch", "train.epochs", "train.ema_decay"}
    decided |= {"init.freeze"} if family == "hsvit_backbone" else set()
    model = {"family": family, "variant": ""}
    found = set(recipes.values("paper", model, data_set)) - {"data.image_size", "data.repeats"}
    assert found == decided


def recipe_of(spec):
    return config_lib.get_config(f"{spec}:cifar10,paper")


def warmup(config, epochs=300):
    """Epochs of warm-up in a run of `epochs`, of 10 steps each."""
    config = config_lib.override(config, [f"train.epochs={epochs}"])
    return config_lib.resolve(config, images=10 * config.train.batch).optim.warmup_epochs


def test_what_the_papers_say():
    """ViX section 4; HVT section 5; DHVT supplement 4.1 and table 5."""
    for family in ("vix", "levix", "ccx", "cvx", "pix"):
        c = recipe_of(family)
        assert (c.train.batch, c.optim.learning_rate, c.optim.weight_decay) == (64, 1e-3, 0.01)
        assert (c.optim.beta1, c.optim.beta2, c.optim.cosine_per) == (0.9, 0.999, "never")
        assert not any((c.augment.flip, c.augment.mix_probability, c.augment.rand_augment_ops))
    for family in ("hvt", "deit"):
        c = recipe_of(family)
        assert (c.train.batch, c.train.epochs, c.data.image_size) == (128, 300, (224, 224))
        assert (c.optim.learning_rate, c.optim.weight_decay) == (1.25e-4, 0.025)
        large = config_lib.get_config(f"{family}:imagenet,paper")
        assert (large.train.batch, large.optim.learning_rate) == (1024, 5e-4 * 1024 / 512)
        for recipe in (c, large):
            crops = (recipe.augment.random_resized_crop, recipe.augment.crop_padding)
            assert (*crops, warmup(recipe)) == ((0.08, 1.0), 0, 5)
    c = recipe_of("dhvt")
    assert (c.train.batch, c.train.epochs, c.optim.learning_rate) == (512, 300, 1e-3)
    assert (c.augment.random_resized_crop, c.augment.crop_padding) == ((), 4)
    assert warmup(c) == 5  # the authors' script for CIFAR
    large = config_lib.get_config("dhvt:s,patch16,imagenet,paper")
    assert (large.train.batch, large.optim.learning_rate) == (512, 5e-4)
    assert (large.optim.weight_decay, warmup(large)) == (0.05, 10)
    assert (large.augment.random_resized_crop, large.augment.crop_padding) == ((0.08, 1.0), 0)
    c = resolved("dhvt:t-patch16,domainnet/sketch,paper")
    assert (c.train.batch, c.train.epochs, c.data.image_size) == (256, 300, (224, 224))
    assert (warmup(c), c.data.num_classes, c.augment.crop_padding) == (20, 345, 0)
    assert c.optim.learning_rate == 1e-3 * 256 / 512  # as the authors' script scales it
    for variant in ("t-patch16", "s-patch16"):  # table 10
        c = config_lib.get_config(f"dhvt:{variant},cifar100,paper")
        crops = (c.augment.random_resized_crop, c.augment.crop_padding)
        assert (c.data.image_size, *crops) == ((224, 224), (0.08, 1.0), 0)
    for c in (large, recipe_of("hvt")):
        augment = c.augment
        assert (augment.mixup, augment.cutmix, augment.erasing) == (0.8, 1.0, 0.25)
        assert augment.flip and augment.label_smoothing == 0.1
        assert (augment.rand_augment_kind, augment.erasing_noise, c.data.repeats) == (
            "timm",
            True,
            3,
        )
    assert not config_lib.get_config("dhvt:digits,paper").augment.flip
    at_224 = config_lib.get_config("swin:t,cifar100,paper").augment
    assert (at_224.random_resized_crop, at_224.crop_padding) == ((0.08, 1.0), 0)


def test_fine_tuning_as_the_supplement_of_dhvt():
    """Sections 2.1 and 3.3, and the authors' script; of the networks trained on ImageNet."""
    for words, heads in (("t", 3), ("s", 6)):
        c = config_lib.get_config(f"dhvt:{words},finetune,cifar100")
        assert (c.model.patch, c.model.heads, c.data.image_size) == (16, heads, (224, 224))
        assert (c.train.batch, c.train.epochs, warmup(c, 100)) == (256, 100, 2)
        assert (c.optim.learning_rate, c.optim.weight_decay) == (5e-4 * 256 / 512, 1e-8)
        assert (c.init.classifier, c.augment.crop_padding, c.data.repeats) == ("new", 0, 1)
        assert c.data.mean == data.describe("imagenet").mean
    with pytest.raises(ValueError, match=r"t could be t-patch4"):
        config_lib.get_config("dhvt:t,cifar100")
    with pytest.raises(ValueError, match="the recipe finetune would need trained weights"):
        init_from.refuse_random(c)
    assert config_lib.get_config("dhvt:t-patch4,cifar100,finetune").augment.crop_padding == 4


def test_table_2_of_the_hsvit_paper_lowers_the_rate_where_its_note_says():
    rates = {
        (words, data_set): config_lib.get_config(f"{words},{data_set},paper").optim.learning_rate
        for words in ("vit:b-patch4", "cvt:13-patch4", "cvt:21-patch4", "resnet:50")
        for data_set in ("cifar10", "cifar100", "fashion_mnist", "tiny_imagenet", "food101")
    }
    low = {key for key in rates if key[0] == "vit:b-patch4"}
    low |= {("cvt:13-patch4", "food101"), ("cvt:21-patch4", "tiny_imagenet")}
    assert rates == {key: 1e-4 if key in low else 1e-3 for key in rates}
    batches = [
        config_lib.get_config(f"vit:{data_set},paper").train.batch
        for data_set in ("cifar10", "tiny_imagenet", "food101")
    ]
    assert batches == [512, 128, 16]


def test_images_of_table_2_of_the_hsvit_paper_have_the_size_of_its_scripts():
    for words in ("c2a2", "vit:b-patch4", "cvt:13-patch4", "mobilevit:xs", "resnet:50"):
        spec = words if ":" in words else f"{words}:"
        c = resolved(f"{spec},food101,paper")
        assert (c.data.image_size, c.data.fit) == ((128, 128), "stretch")
        assert resolved(f"{spec},cifar10,paper").data.fit == "crop"
    assert resolved("cvt:13-patch4,fashion_mnist,paper").data.image_size == (32, 32)
    assert resolved("hvt:s-4,food101,paper").data.fit == "crop"


@pytest.mark.parametrize(
    ("words", "side"), [("resnet50", 224), ("efficientnet_b4", 380), ("efficientnet_b5", 456)]
)
def test_table_3_of_the_hsvit_paper(words, side):
    c = resolved(f"hsvit_backbone:{words},imagenet,paper")
    assert (c.init.freeze, c.init["from"]) == ("backbone", "")
    assert (c.train.batch, c.train.epochs, c.data.image_size) == (128, 30, (side, side))
    o = c.optim
    assert (o.learning_rate, o.weight_decay, warmup(c)) == (1e-3, 0.01, 2)
    assert (o.cosine_per, o.clip_norm) == ("step", 0.01)
    a = c.augment
    assert (a.random_resized_crop, a.crop_padding, a.flip) == ((0.08, 1.0), 0, True)
    assert (a.trivial_augment, a.rand_augment_ops, a.erasing) == (True, 0, 0.1)
    assert (a.mixup, a.cutmix, a.mix_probability, a.label_smoothing) == (0.2, 1.0, 1.0, 0.1)
    assert config_lib.get_config("hsvit_backbone:digits,tiny,paper").init.freeze == ""
    whole = config_lib.get_config("hsvit_backbone:imagenet,paper", "init.freeze=")
    assert whole.init.freeze == ""


def test_the_strong_recipe_is_the_same_for_all():
    for data_set in ("cifar10", "digits"):
        sections = {
            repr([(part, dict(c[part])) for part in ("augment", "optim", "train", "data")])
            for family in ("c2a2", *FAMILIES)
            for c in [config_lib.get_config(f"{family}:{data_set}")]
        }
        assert len(sections) == 1


def test_the_fast_recipe_is_muon_with_crop_and_flip_alone():
    for family in ("c2a2", *FAMILIES):
        c = resolved(f"{family}:cifar10,fast")
        assert (c.optim.name, c.train.epochs, c.eval.tta) == ("muon", 12, "flip")
        assert c.model.get("dropout", 0.0) == c.train.ema_decay == 0
        assert set(step.augment_settings(c).active()) == {"crop_padding", "flip"}
        assert c.augment.crop_padding == 2
    digits = resolved("c2a2:digits,fast")
    assert (digits.train.epochs, digits.eval.tta) == (6, "none")


def test_fast_and_strong_alone_show_images_both_ways():
    for recipe, both in (("fast", 1), ("strong", 1), ("paper", 0), ("small", 0), ("finetune", 0)):
        augment = resolved(f"c2a2:cifar10,{recipe}").augment
        assert augment.crop_reflect == augment.flip_alternate == bool(both), recipe
    assert resolved("c2a2:cifar10,strong").augment.crop_padding == 4
    assert config_lib.get_config("c2a2:imagenet,fast").augment.crop_padding == 16
    assert not resolved("c2a2:digits,strong").augment.crop_reflect


@pytest.mark.parametrize("family", ["vix", "levix", "ccx", "cvx", "pix"])
def test_digits_have_a_token_for_each_of_their_pixels(family):
    for variant in models.FAMILIES[family].variants:
        for recipe, side in (("strong", 8), ("paper", 32)):
            c = sizes_of(resolved(f"{family}:{variant},digits,{recipe}"))
            size = c.map_sizes[-1] if family == "cvx" else c.map_size
            assert size == (side, side)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_smoke_run_of_every_variant_is_small(family):
    """And what tells variants apart is still there. For large images in colour too."""
    seen = set()
    for variant in models.FAMILIES[family].variants:
        config = resolved(f"{family}:{variant},digits,tiny")
        assert (config.train.steps, config.train.epochs) == (8, 0)
        if (sizes := repr(sizes_of(config))) not in seen:
            assert costs.parameters(train.build_model(config)) < 40_000
        seen.add(sizes)
    for data_set in ("fashion_mnist", "tiny_imagenet", "food101", "imagenet"):
        assert resolved(f"{family}:{data_set},tiny").data.image_size == (32, 32)
    for side in (32, 224):
        config = resolved(f"{family}:imagenet,tiny", f"data.image_size={side}")
        assert train.build_model(config).config.image_size == (side, side)
    # Widths, heads and depths are one when small. HVT: 0 to 4 poolings, and three other kinds.
    # DeiT: with CLS, without, and two shares for PoWER. DHVT: three patches and eleven ablations.
    different = {"hvt": 8, "deit": 4, "dhvt": 14}
    # Baselines: CvT's first patch, the expansion of a MobileViT-XXS, EfficientViT's kernels.
    # FastViT: two ratios without attention, and three rates of stochastic depth with it.
    different |= {"vit": 1, "swiftformer": 1, "efficientformer": 1, "cvt": 2, "mobilevit": 2}
    different |= {"t2t": 2}  # performers and softmax
    different |= {"efficientvit": 2, "fastvit": 5}
    assert len(seen) == different.get(family, len(models.FAMILIES[family].variants))
